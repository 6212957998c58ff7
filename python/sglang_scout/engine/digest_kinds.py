"""How pages are summarised: the kinds of digest that policies choose from, and how each is built and scored.

Shapes: L layers, P pages, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sglang_scout.core.forecast import PageWeights
from sglang_scout.engine.step_inputs import Candidates
from sglang_scout.engine.stores import ModelShape
from sglang_scout.ops.minmax import build_layer_digests, score_pages
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.rotated import (
    STATS_BYTES,
    build_layer_rotated,
    mass_change_rotated,
    planes_shape,
    score_rotated,
)

Parts = tuple[Tensor, Tensor]

UNSET = 0x7FC0
"""Sentinel: a NaN in bfloat16, and in any kind two bytes that hardly any page has in both marks."""

MARK_BYTES = 4
"""Second part of a kind that needs one: zeros that mark it as written. A transfer identifies kinds by their parts'
ratio."""


class DigestKind:
    """How digests are built and scored. This kind, for policies without page selection, has marks alone.

    Args:
        parts: of the pool, viewed here as the kind's ops expect.
        weights: arrays of the file (``core/forecast.py``) that has the ``trained`` ones; empty for other kinds.

    Attributes:
        name: as the key ``digest`` has it.
        has_mark: the last word of every digest that is written is 0; the pool writes it.
        mass_change: see :meth:`Rotated.mass_change`; None: scores are bounds, not estimates.
    """

    name = "none"
    trained: tuple[str, ...] = ()
    has_mark = True
    mass_change: Callable[..., Tensor] | None = None

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[Tensor]) -> None:
        self.first, self.second = parts

    @classmethod
    def part_bytes(cls, shape: ModelShape, weights: PageWeights | None) -> tuple[int, int]:
        """Bytes of the two parts for one page and KV head."""
        return MARK_BYTES, 2 * MARK_BYTES

    def build(self, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        """As :func:`build_layer_digests`."""
        self.first.index_fill_(1, ids, 0)

    def score(self, layer: int, query: Tensor, of: Candidates, scale: float) -> Tensor:
        """``[B * C, N]`` fp32 scores of each list's candidates, for ``query`` ``[B * C, HQ / C, D]``; undefined where
        the budget covers them all."""
        raise NotImplementedError("pages without digests cannot be scored")


class MinMax(DigestKind):
    """Bounds of each channel, and so of scores."""

    name = "minmax"
    has_mark = False
    score_op: Callable[..., Tensor] = staticmethod(score_pages)

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[Tensor]) -> None:
        self.first, self.second = (part.view(shape.dtype) for part in parts)

    @classmethod
    def part_bytes(cls, shape: ModelShape, weights: PageWeights | None) -> tuple[int, int]:
        return (shape.head_dim * shape.dtype.itemsize,) * 2

    def build(self, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        build_layer_digests(source, ids, self.first, self.second, rows)

    def score(self, layer: int, query: Tensor, of: Candidates, scale: float) -> Tensor:
        parts = self.first[layer], self.second[layer]
        if of.lists > 1:  # each head's digests as separate pages
            parts = tuple(part.flatten(0, 1).unsqueeze(1) for part in parts)
        return self.score_op(query, *parts, of.digest_rows, of.list_n_scored, scale)


class Rotated(MinMax):
    """Bits of rotated keys about the page's mean."""

    name = "rotated-2"
    score_op = staticmethod(score_rotated)

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[Tensor]) -> None:
        first, self.second = parts
        self.first = first.unflatten(-1, planes_shape(shape.head_dim))

    @classmethod
    def part_bytes(cls, shape: ModelShape, weights: PageWeights | None) -> tuple[int, int]:
        return 8 * shape.head_dim, shape.head_dim + STATS_BYTES

    def build(self, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        build_layer_rotated(source, ids, self.first, self.second, rows)

    def mass_change(
        self,
        layer: int,
        query: Tensor,
        query_ahead: Tensor,
        pages: Tensor,
        n_pages: Tensor,
        scale: float,
    ) -> Tensor:
        """``[B, HQ]`` estimated increase of the log mass of a list's missing pages under the real query.

        The CPU attends to them one layer ahead, weighted by the predicted query. Pages important to the real query
        may be among them, and get the mass that they should have.

        Args:
            query, query_ahead: ``[B, HQ, D]``.
            pages: ``[B * C, k]``, of which each row has the first ``n_pages`` ``[B * C]``; the change is 0 for a row
                without any.
        """
        parts = self.first[layer], self.second[layer]
        return mass_change_rotated(query, query_ahead, *parts, pages, n_pages, scale)


KINDS: dict[str, type[DigestKind]] = {kind.name: kind for kind in (DigestKind, MinMax, Rotated)}
"""Kinds for selection by all heads of a layer, or for none; policies may have others."""
