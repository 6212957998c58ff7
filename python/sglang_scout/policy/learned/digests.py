"""Digests of SparDA and RheoServe: one or two vectors per page and KV head, which a head scores by its own query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_scout.core.forecast import PageWeights
from sglang_scout.engine.digest_kinds import MARK_BYTES, DigestKind, Parts
from sglang_scout.engine.step_inputs import Candidates
from sglang_scout.engine.stores import ModelShape
from sglang_scout.ops.layers import LayerPages
from sglang_scout.policy.learned.embed import (
    build_layer_means,
    build_layer_pilots,
    score_embeddings,
)


class Means(DigestKind):
    """Mean keys of a page's halves; each KV head selects with one query vector."""

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
    """Learned embeddings of pages, and of the real queries of each KV head."""

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
