"""Page embeddings: a few vectors per page and KV head, scored by dot products with one query per KV head.

means   K~ of arXiv 2606.04511, equation 5, pooled with kernel size one page and stride half a page. Stored are the
        means of the page's two halves, so a digest depends on that page alone; a window averages adjacent halves.
pilots  e = W_k pool(K), a trained low-rank embedding, pooled as in SeerAttention (arXiv 2410.13276): the mean and each
        channel's element of largest magnitude, with its sign, as channels after RoPE are negative as often as positive.

NaN elements of K count as 0, and large ones are clamped to LARGEST or the dtype's range: all scores are finite.
"""

from __future__ import annotations

from typing import Annotated

import torch

from . import triton
from .digest import exact_in, same_rows
from .layers import LayerPages, source_rows
from .op import Call, Tolerance, op

LARGEST = 2.0**50

_MEAN = "fp32 sums over a page in another order, then one rounding to the dtype of K"
MEAN_TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, _MEAN),
    "bfloat16": Tolerance(1e-5, 2**-7, _MEAN),
    "float16": Tolerance(1e-5, 2**-10, _MEAN),
}
_PILOT = "fp32 sums of up to 512 products in another order, then one rounding"
PILOT_TOLERANCES = {n: Tolerance(2e-4, x.rtol, _PILOT) for n, x in MEAN_TOLERANCES.items()}
_SCORE = Tolerance(5e-5, 2e-5, "fp32 sums of up to 256 products in another order")
TOLERANCES = dict.fromkeys(MEAN_TOLERANCES, _SCORE)


def largest(dtype: torch.dtype) -> float:
    """Clamp for the magnitude of elements of K and of embeddings."""
    return min(LARGEST, torch.finfo(dtype).max)


def limited(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Clamped fp32, with NaN as 0."""
    most = largest(dtype)
    return x.float().nan_to_num(0.0, most, -most).clamp(-most, most)


def half_means(k: torch.Tensor) -> torch.Tensor:
    """[n, S, H, D] -> [n, H, 2, D] float32: the mean key of each half of a page."""
    return limited(k, k.dtype).unflatten(1, (2, -1)).mean(2).transpose(1, 2)


def pooled(k: torch.Tensor) -> torch.Tensor:
    """[n, S, H, D] -> [n, H, 2 D] float32: mean, then each channel's element of largest magnitude (positive if
    tied)."""
    k = limited(k, k.dtype)
    low, high = torch.aminmax(k, dim=1)
    return torch.cat([k.mean(1), torch.where(high >= -low, high, low)], -1)


def _two_halves(call: Call) -> str:
    if call.sizes["S"] % 2:
        return f"pages have {call.sizes['S']} tokens, expected an even number"
    return exact_in(call, "embeddings") or same_rows(call)


@op(_two_halves, tolerances=MEAN_TOLERANCES)
def build_layer_means(
    source: Annotated[LayerPages, "L R S H D kv"],
    ids: Annotated[torch.Tensor, "n int64"],
    embeddings: Annotated[torch.Tensor, "L P H 2 D digest"],
    rows: Annotated[torch.Tensor | None, "L n int64"] = None,
) -> None:
    """Write the means of the two halves of pages ``ids`` in every layer; all other rows are unchanged. One launch.

    Args:
        source, ids, rows: as in `build_layer_digests`; S even.
        embeddings: dtype of K, or a wider one if K is fp8; mutated.
    Source: arXiv 2606.04511, equation 5; see the module docstring.
    """
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        means = half_means(k.to(embeddings.device, embeddings.dtype))
        embeddings[layer].index_copy_(0, ids, means.to(embeddings.dtype))


def _one_embedding(call: Call) -> str:
    return exact_in(call, "embeddings") or same_rows(call)


@op(_one_embedding, tolerances=PILOT_TOLERANCES)
def build_layer_pilots(
    source: Annotated[LayerPages, "L R S H D kv"],
    ids: Annotated[torch.Tensor, "n int64"],
    embeddings: Annotated[torch.Tensor, "L P H 1 E digest"],
    w_k: Annotated[torch.Tensor, "L H E 2*D float32"],
    rows: Annotated[torch.Tensor | None, "L n int64"] = None,
) -> None:
    """Write e = W_k pool(K) of pages ``ids`` in every layer; all other rows are unchanged. One launch.

    Args:
        source, ids, rows: as in `build_layer_digests`.
        embeddings: dtype of K, or a wider one if K is fp8; mutated.
    Source: SeerAttention (arXiv 2410.13276), section 3; see the module docstring.
    """
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        pool = pooled(k.to(embeddings.device, embeddings.dtype))
        e = torch.einsum("hrx,nhx->nhr", w_k[layer], pool)
        e = limited(e, embeddings.dtype).to(embeddings.dtype)
        embeddings[layer].index_copy_(0, ids, e[:, :, None])


def _one_or_two(call: Call) -> str:
    W = call.sizes["W"]
    return "" if W in (1, 2) else f"embeddings has W={W}, expected 1 or 2"


@op(_one_or_two, tolerances=TOLERANCES)
def score_embeddings(
    q: Annotated[torch.Tensor, "B*H E query"],
    embeddings: Annotated[torch.Tensor, "P H W E digest"],
    table: Annotated[torch.Tensor, "B N int32"],
    n_full: Annotated[torch.Tensor, "B int32"],
) -> torch.Tensor:
    """Score every full page of every request separately for each KV head, with one query per head.

    With one embedding per page: s = q . e. With two, the means a and b of its halves: the maximum over its windows,

        s[p] = max(q . (a[p] + b[p]) / 2, q . (b[p] + a[p + 1]) / 2)

    where the second one exists only if the next column is a full page. No softmax and no sum over heads.

    Args:
        q: row b * H + h belongs to KV head h of request b.
        embeddings: of one layer, W = 1 or 2.
        table, n_full: as in `score_pages`; columns are in sequence order.
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
    return score.masked_fill(void[:, None], -torch.inf).flatten(0, 1)


build_layer_means.triton("embed", sizes=triton.PAGES)
build_layer_pilots.triton("embed", sizes=triton.PAGES)
score_embeddings.triton("embed", sizes={"E": range(1, 257)})
