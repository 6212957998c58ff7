"""Page embeddings: a few vectors per page and KV head, scored by dot products with one query per KV head.

means   K~ of arXiv 2606.04511, equation 5, pooled with kernel size one page and stride half a page: 32 and 16 for a
        page of 32 tokens. Stored are the means of the page's two halves; a window is the average of adjacent
        halves, so the digest of a page depends on that page alone.
pilots  e = W_k pool(K), a trained low-rank embedding, pooled as in SeerAttention (arXiv 2410.13276): the mean and, for
        each channel, the element of largest magnitude, with its sign: channels after RoPE are negative as often as
        positive, and a maximum would miss half of the large elements.

NaN elements of K count as 0, and large ones are clamped to LARGEST or the dtype's range: all scores are finite.
"""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import triton
from .digest import exact_in, same_rows
from .layers import LayerPages, source_rows
from .op import Call, op

LARGEST = 2.0**50

_MEAN = "fp32 sums over a page in another order, then one rounding to the dtype of K"
MEAN_TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, _MEAN),
    "bfloat16": Tolerance(1e-5, 2**-7, _MEAN),
    "float16": Tolerance(1e-5, 2**-10, _MEAN),
}
PILOT_TOLERANCES = {
    name: Tolerance(
        2e-4, x.rtol, "fp32 sums of up to 512 products in another order, then one rounding"
    )
    for name, x in MEAN_TOLERANCES.items()
}
TOLERANCES = dict.fromkeys(
    MEAN_TOLERANCES, Tolerance(5e-5, 2e-5, "fp32 sums of up to 256 products in another order")
)


def largest(dtype: torch.dtype) -> float:
    """Clamp for the magnitude of elements of K and of embeddings."""
    return min(LARGEST, torch.finfo(dtype).max)


def _limited(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamped fp32, with NaN as 0."""
    most = largest(dtype)
    return x.float().nan_to_num(0.0, most, -most).clamp(-most, most)


def half_means(k: torch.Tensor) -> torch.Tensor:
    """[n, S, H, D] -> [n, H, 2, D] float32: the mean key of each half of a page."""
    return _limited(k, k.dtype).unflatten(1, (2, -1)).mean(2).transpose(1, 2)


def pooled(k: torch.Tensor) -> torch.Tensor:
    """[n, S, H, D] -> [n, H, 2 D] float32: the mean, then each channel's element of largest magnitude (the positive
    one if tied)."""
    k = _limited(k, k.dtype)
    low, high = torch.aminmax(k, dim=1)
    return torch.cat([k.mean(1), torch.where(high >= -low, high, low)], -1)


def _two_halves(call: Call) -> str:
    if call.sizes["W"] != 2 or call.sizes["S"] % 2:
        return f"embeddings has W={call.sizes['W']} and pages {call.sizes['S']} tokens, expected 2 and an even number"
    return exact_in(call, "embeddings") or same_rows(call)


@op(
    _two_halves,
    source="L R S H D kv",
    ids="n int64",
    rows="L n int64",
    embeddings="L P H W D digest",
    tolerances=MEAN_TOLERANCES,
)
def build_layer_means(
    source: LayerPages,
    ids: torch.Tensor,
    embeddings: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Write the means of the two halves of pages ``ids`` in every layer; all other rows are unchanged.

    One launch on a device, regardless of the number of layers.

    Args:
        source, ids, rows: as in `build_layer_digests`; S even.
        embeddings: [L, P, H, 2, D] dtype of K, or a wider one if K is fp8; mutated.
    Source: arXiv 2606.04511, equation 5; see the module docstring.
    """
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        means = half_means(k.to(embeddings.device, embeddings.dtype))
        embeddings[layer].index_copy_(0, ids, means.to(embeddings.dtype))


def _one_embedding(call: Call) -> str:
    W, X, D = (call.sizes[axis] for axis in "WXD")
    if W != 1 or X != 2 * D:
        return f"embeddings has W={W} and w_k X={X}, expected 1 and 2 D={2 * D}"
    return exact_in(call, "embeddings") or same_rows(call)


@op(
    _one_embedding,
    source="L R S H D kv",
    ids="n int64",
    rows="L n int64",
    w_k="L H E X float32",
    embeddings="L P H W E digest",
    tolerances=PILOT_TOLERANCES,
)
def build_layer_pilots(
    source: LayerPages,
    ids: torch.Tensor,
    embeddings: torch.Tensor,
    w_k: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Write e = W_k pool(K) of pages ``ids`` in every layer; all other rows are unchanged.

    One launch on a device, regardless of the number of layers.

    Args:
        source, ids, rows: as in `build_layer_digests`.
        embeddings: [L, P, H, 1, r] dtype of K, or a wider one if K is fp8; mutated.
        w_k: [L, H, r, 2 D] float32.
    Source: SeerAttention (arXiv 2410.13276), section 3; see the module docstring.
    """
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        pool = pooled(k.to(embeddings.device, embeddings.dtype))
        e = torch.einsum("hrx,nhx->nhr", w_k[layer], pool)
        e = _limited(e, embeddings.dtype).to(embeddings.dtype)
        embeddings[layer].index_copy_(0, ids, e[:, :, None])


def _one_or_two(call: Call) -> str:
    W, dtype = call.sizes["W"], call.dtypes["kv"]
    if W in (1, 2) and dtype.is_floating_point:
        return ""
    return f"embeddings has W={W} and dtype {dtype}, expected 1 or 2 and a float"


@op(
    _one_or_two,
    embeddings="P H W E kv",
    table="B N int32",
    n_full="B int32",
    q="B*H E query",
    out="B*H N float32",
    tolerances=TOLERANCES,
)
def score_embeddings(
    q: torch.Tensor,
    embeddings: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every full page of every request separately for each KV head, with one query per head.

    With one embedding per page: s = q . e. With two, the means a and b of its halves: the maximum over its windows,

        s[p] = max(q . (a[p] + b[p]) / 2, q . (b[p] + a[p + 1]) / 2)

    where the second one exists only if the next column is a full page. No softmax and no sum over heads.

    Args:
        q: [B * H, E] any float dtype, row b * H + h belongs to KV head h of request b.
        embeddings: [P, H, W, E] any float dtype, of one layer, W = 1 or 2.
        table, n_full: as in `score_pages`; columns are in sequence order.
        out: [B * H, N] float32 to write into, instead of a new tensor.
    Returns:
        [B * H, N] float32; -inf in columns >= n_full and where table < 0.
    Source: arXiv 2606.04511, equation 11 and its max-pooling to blocks (section 4.3).
    """
    (B, N), (H, W, E) = table.shape, embeddings.shape[1:]
    void = (torch.arange(N, device=table.device) >= n_full[:, None]) | (table < 0)
    of_pages = embeddings.index_select(0, table.clamp(min=0).flatten()).view(B, N, H, W, E)
    dots = torch.einsum("bhe,bnhwe->bhwn", q.float().view(B, H, E), of_pages.float())
    dots = dots.masked_fill_(void[:, None, None], -torch.inf)
    score = dots[:, :, 0]
    if W == 2:
        following = torch.nn.functional.pad(score, (0, 1), value=-torch.inf)[..., 1:]
        score = (dots[:, :, 1] + torch.maximum(score, following)) / 2
    score = score.masked_fill(void[:, None], -torch.inf).flatten(0, 1)
    return score if out is None else out.copy_(score)


for _build in (build_layer_means, build_layer_pilots):
    triton.implements(
        _build,
        "embed",
        pinned=("source.k",),
        dtypes=triton.KV_DTYPES,
        sizes={"D": triton.HEAD_DIMS, "S": triton.PAGE_TOKENS},
    )
triton.implements(score_embeddings, "embed", sizes={"E": range(1, 257)})
