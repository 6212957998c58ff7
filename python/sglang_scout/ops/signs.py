"""Page digests of one bit per key element: the signs of a page's keys.

A page of 32 tokens has two words of 16 bits for every channel, which is what a 16-bit minimum and
maximum take (`digest`), and says something of each token instead of bounding all of them by one box.
The sum of +-q over the channels estimates q.k up to a factor: quantisation to one bit, as in sign
random projections and in RaBitQ without its rotation. The factor differs from layer to layer and is
not known, so a head's scores are taken in units of their own standard deviation.
"""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import triton
from .digest import same_rows
from .layers import LayerPages, source_rows
from .op import Call, op

PAGE_TOKENS = 32
WORD_TOKENS = 16
"""Tokens whose signs are the bits of one word."""
LEAST_SPREAD = 1e-5
"""Of a head's largest score: what differs less, differs by rounding, and the head has no say."""
_BITS_OF = {4: torch.int32, 2: torch.int16}

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "a sign is read, not computed")
    for name in ("float32", "bfloat16", "float16")
}
# Sums of at most D = 256 products +-q in another order: 1e-5 of their size. In units of the standard
# deviation over the pages that is more where the pages hardly differ.
SCORE_TOLERANCES = {
    name: Tolerance(
        2e-3, 1e-4, "fp32 sums in another order, divided by their spread over the pages"
    )
    for name in ("float32", "bfloat16", "float16")
}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size."""
    return x.view(_BITS_OF[x.element_size()])


def signs_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """[n, H, D] words, two for every channel -> [n, 32, H, D] float32, +1 or -1."""
    place = torch.arange(WORD_TOKENS, dtype=torch.int32, device=low.device).view(-1, 1, 1)
    halves = [(as_bits(x).int()[:, None] >> place) & 1 for x in (low, high)]
    return torch.cat(halves, dim=1).float() * 2 - 1


def _valid(call: Call) -> str:
    tokens = call.sizes["S"]
    wrong = f"source.k has S={tokens}, expected {PAGE_TOKENS}" if tokens != PAGE_TOKENS else ""
    return wrong or same_rows(call)


@op(
    _valid,
    source="L R S H D kv",
    ids="n int64",
    rows="L n int64",
    low="L P H D kv",
    high="L P H D kv",
    tolerances=TOLERANCES,
)
def build_layer_signs(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Write the signs of pages ``ids`` in every layer, all other rows stay as they are.

    On a device one launch, whatever the number of layers.

    Args:
        source: K of each layer, [P, 32, H, D] any float dtype; the named pages are full.
        ids: [n] int64 in [0, P); n may be 0.
        low, high: [L, P, H, D] dtype of K, taken as integers of that size; mutated. Bit t is set
            where token t (low) or 16 + t (high) has no minus sign; the other bits are 0.
        rows: as of `build_layer_digests`.
    """
    for layer, k in enumerate(source_rows(source, ids, rows)):
        pages = k.to(low.device)
        bits = (~torch.signbit(pages)).view(-1, 2, WORD_TOKENS, *pages.shape[2:]).int()
        place = 1 << torch.arange(WORD_TOKENS, dtype=torch.int32, device=low.device)
        words = (bits * place.view(-1, 1, 1)).sum(2)  # [n, 2, H, D] int64
        for half, target in enumerate((low, high)):
            word = words[:, half].to(_BITS_OF[k.element_size()])
            as_bits(target[layer]).index_copy_(0, ids, word)


@op(
    low="P H D kv",
    high="P H D kv",
    table="B N int32",
    n_full="B int32",
    q="B H*G D float32",
    out="B N float32",
    tolerances=SCORE_TOLERANCES,
)
def score_signs(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every full page of every request against its (predicted) query.

        u[h, p] = max_t sum_d q[h, d] sign(k[p, t, d])
        score[p] = max_h (u[h, p] - mean_p u[h]) / std_p u[h]

    A head that finds what it looks for has one page far above all others, one that looks nowhere in
    particular has none: the first decides. Mean and deviation are over the request's full pages.

    Args:
        q: [B, HQ, D] float32, after RoPE.
        low, high: [P, H, D] of one layer, see `build_layer_signs`; H divides HQ.
        table: [B, N] int32, page ids below P; negative ones are padding.
        n_full: [B] int32; of row b only the first n_full[b] columns are offered.
        out: [B, N] float32 to write into, instead of a new tensor.
    Returns:
        [B, N] float32; -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: one-bit codes as in RaBitQ (arXiv 2405.12497); their use for pages and the reduction: ours.
    """
    (B, N), (H, D) = table.shape, low.shape[1:]
    if not table.numel():
        return q.new_empty(table.shape) if out is None else out
    ids = table.clamp(min=0).flatten()
    signs = signs_of(low.index_select(0, ids), high.index_select(0, ids))
    u = torch.einsum("bhgd,bnthd->bhgnt", q.view(B, H, -1, D), signs.view(B, N, -1, H, D))
    u = u.amax(-1).flatten(1, 2)  # [B, HQ, N]
    void = (torch.arange(N, device=table.device) >= n_full[:, None]) | (table < 0)
    count = (~void).sum(1).clamp(min=1)[:, None, None]
    hidden = void[:, None]
    largest = u.masked_fill(hidden, 0.0).abs().amax(-1, keepdim=True)
    u = u - u.masked_fill(hidden, 0.0).sum(-1, keepdim=True) / count
    spread = (u.masked_fill(hidden, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    score = torch.where(spread > LEAST_SPREAD * largest, u / spread, 0.0).amax(1)
    score.masked_fill_(void, -torch.inf)
    return score if out is None else out.copy_(score)


triton.implements(build_layer_signs, "pages", pinned=("source.k",), sizes={"D": triton.HEAD_DIMS})
triton.implements(score_signs, "signs", sizes={"D": triton.HEAD_DIMS})
