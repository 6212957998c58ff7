"""Policies whose KV heads select pages by embeddings, a few vectors per page and KV head, scored by dot products with
one query per KV head. Most are trained (``scripts/train_forecast.py``).

means   K~ of arXiv 2606.04511, equation 5, pooled with kernel size one page and stride half a page. Stored are the
        means of the page's two halves, so a digest depends on that page alone; a window averages adjacent halves.
pilots  e = W_k pool(K), a trained low-rank embedding, pooled as in SeerAttention (arXiv 2410.13276): the mean and each
        channel's element of largest magnitude, with its sign, as channels after RoPE are negative as often as positive.

NaN elements of K count as 0, and large ones are clamped to LARGEST or the dtype's range: all scores are finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from sglang_scout.core.forecast import PageWeights
from sglang_scout.engine.digests import MARK_BYTES, DigestKind, Parts
from sglang_scout.engine.step_buffers import Candidates
from sglang_scout.engine.stores import ModelShape
from sglang_scout.ops.pages import LayerPages, limited, source_rows
from sglang_scout.ops.triton import Lazy

kernels = Lazy(f"{__package__}.kernels")


def half_means(k: Tensor) -> Tensor:
    """[n, S, H, D] -> [n, H, 2, D] float32: the mean key of each half of a page."""
    return limited(k, k.dtype).unflatten(1, (2, -1)).mean(2).transpose(1, 2)


def pooled(k: Tensor) -> Tensor:
    """[n, S, H, D] -> [n, H, 2 D] float32: mean, then each channel's element of largest magnitude (positive if
    tied)."""
    k = limited(k, k.dtype)
    low, high = torch.aminmax(k, dim=1)
    return torch.cat([k.mean(1), torch.where(high >= -low, high, low)], -1)


def build_layer_means(
    source: LayerPages,
    ids: Int64[Tensor, " n"],
    embeddings: Float[Tensor, "L P H 2 D"],
    rows: Int64[Tensor, "L n"] | None = None,
) -> None:
    """Write the means of the two halves of pages ``ids`` in every layer; all other rows are unchanged. One launch.

    Args:
        source, ids, rows: as in `build_layer_digests`; S even.
        embeddings: dtype of K, or a wider one if K is fp8; mutated.
    Source: arXiv 2606.04511, equation 5; see the module docstring.
    """
    run = kernels.build_layer_means if embeddings.is_cuda else build_layer_means_reference
    run(source, ids, embeddings, rows)


def build_layer_means_reference(source, ids, embeddings, rows=None):
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        means = half_means(k.to(embeddings.device, embeddings.dtype))
        embeddings[layer].index_copy_(0, ids, means.to(embeddings.dtype))


def build_layer_pilots(
    source: LayerPages,
    ids: Int64[Tensor, " n"],
    embeddings: Float[Tensor, "L P H 1 E"],
    w_k: Float32[Tensor, "L H E pooled"],
    rows: Int64[Tensor, "L n"] | None = None,
) -> None:
    """Write e = W_k pool(K) of pages ``ids`` in every layer; as `build_layer_means`.

    Source: SeerAttention (arXiv 2410.13276), section 3; see the module docstring.
    """
    run = kernels.build_layer_pilots if embeddings.is_cuda else build_layer_pilots_reference
    run(source, ids, embeddings, w_k, rows)


def build_layer_pilots_reference(source, ids, embeddings, w_k, rows=None):
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        pool = pooled(k.to(embeddings.device, embeddings.dtype))
        e = torch.einsum("hrx,nhx->nhr", w_k[layer], pool)
        e = limited(e, embeddings.dtype).to(embeddings.dtype)
        embeddings[layer].index_copy_(0, ids, e[:, :, None])


def score_embeddings(
    q: Float[Tensor, "BH E"],
    embeddings: Float[Tensor, "P H W E"],
    table: Int32[Tensor, "B N"],
    n_full: Int32[Tensor, " B"],
) -> Float32[Tensor, "BH N"]:
    """Score every full page of every request separately for each KV head, with one query per head.

    With one embedding per page: s = q . e. With two, the means a and b of its halves: the maximum over its windows,

        s[p] = max(q . (a[p] + b[p]) / 2, q . (b[p] + a[p + 1]) / 2)

    where the second one exists only if the next column is a full page. No softmax and no sum over heads.

    Args:
        q: row b * H + h belongs to KV head h of request b.
        embeddings: of one layer, W = 1 or 2.
        table, n_full: as in `score_pages`; columns are in sequence order.
    Returns:
        -inf in columns >= n_full and where table < 0.
    Source: arXiv 2606.04511, equation 11 and its max-pooling to blocks (section 4.3).
    """
    run = kernels.score_embeddings if q.is_cuda else score_embeddings_reference
    return run(q, embeddings, table, n_full)


def score_embeddings_reference(q, embeddings, table, n_full):
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


class Means(DigestKind):
    """SparDA's: mean keys of a page's halves; each KV head selects with one query vector."""

    name = "mean16"
    vectors = 2

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[Tensor]) -> None:
        self.first = parts[0].view(shape.dtype).unflatten(-1, (self.vectors, -1))

    @classmethod
    def part_bytes(cls, shape: ModelShape, weights: PageWeights | None) -> tuple[int, int]:
        return 2 * shape.head_dim * shape.dtype.itemsize, MARK_BYTES

    def build(self, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        build_layer_means(source, ids, self.first, rows)

    def score(self, layer: int, query: Tensor, of: Candidates, scale: float) -> Tensor:
        vectors = query.reshape(len(of.table) * self.first.shape[2], -1).contiguous()
        return score_embeddings(vectors, self.first[layer], of.table, of.n_scored)


class Pilots(Means):
    """RheoServe's: learned embeddings of pages, and of the real queries of each KV head."""

    name = "pilot"
    trained = ("w_k", "w_q")
    vectors = 1

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[Tensor]) -> None:
        super().__init__(parts, shape, weights)
        self._w_k, self._w_q = weights

    @classmethod
    def part_bytes(cls, shape: ModelShape, weights: PageWeights | None) -> tuple[int, int]:
        assert weights is not None
        return weights.rank * shape.dtype.itemsize, MARK_BYTES

    def build(self, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        build_layer_pilots(source, ids, self.first, self._w_k, rows)

    def score(self, layer: int, query: Tensor, of: Candidates, scale: float) -> Tensor:
        by_head = query.reshape(len(of.table), self.first.shape[2], -1).float()
        vectors = torch.einsum("bhx,hrx->bhr", by_head, self._w_q[layer])
        return super().score(layer, vectors, of, scale)
