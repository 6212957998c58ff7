"""Digests: summaries of pages by which they are selected, how each kind is built and scored, and the pool of them.

A digest travels with a page's K and V from the prefill server, or is built here. It has two parts ``[L, P, H, bytes]``,
whose bytes depend on its kind.
Shapes: L layers, P pages, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sglang_scout.core.forecast import PageWeights
from sglang_scout.engine import PageIds
from sglang_scout.engine.device import upload
from sglang_scout.engine.step_buffers import Candidates
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.minmax import build_layer_digests, score_pages
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.rotated import (
    STATS_BYTES,
    build_layer_rotated,
    mass_change_rotated,
    planes_shape,
    score_rotated,
)

if TYPE_CHECKING:
    from sglang_scout.engine.policy import SelectionRule
    from sglang_scout.engine.requests import PageHints

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
        may be among them, and get the mass that they should have. Arguments as of :func:`mass_change_rotated`.
        """
        parts = self.first[layer], self.second[layer]
        return mass_change_rotated(query, query_ahead, *parts, pages, n_pages, scale)


KINDS: dict[str, type[DigestKind]] = {kind.name: kind for kind in (DigestKind, MinMax, Rotated)}
"""Kinds for selection by all heads of a layer, or for none; policies may have others."""


def _marks(parts: Parts) -> list[Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    return [x.view(torch.int16)[:, :, at, at] for x, at in zip(parts, (0, -1), strict=True)]


def unset(parts: Parts, ids: Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment, which would copy the number from host memory and synchronize the stream.
        mark.index_fill_(1, ids, UNSET)


class DigestPool:
    """The digest of every page, and which are valid. Until one is written it holds a sentinel, by which arrival is
    recognised.

    Args:
        rule: its kind of digest, and this rank's part of its weights.

    Attributes:
        score, mass_change: those of the kind (:class:`DigestKind`).
        parts: ``[L, P, H, bytes]`` uint8 each, on ``device``.
        valid: ``[P]`` bool on the host; this page's digests are valid in every layer.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_pages: int,
        device: torch.device | str,
        rule: SelectionRule,
        hints: PageHints | None = None,
    ) -> None:
        of_kind, weights = rule.digest, rule.weights
        self.kind, self.hints = of_kind.name, hints
        arrays = weights.arrays if weights else {}
        trained = [torch.tensor(arrays[name], device=device) for name in of_kind.trained]
        size = shape.num_layers, num_pages, shape.num_kv_heads
        sizes = ((*size, nbytes) for nbytes in of_kind.part_bytes(shape, weights))
        first, second = (torch.zeros(x, dtype=torch.uint8, device=device) for x in sizes)
        self.parts = first, second
        self._of_kind = of_kind(self.parts, shape, trained)
        self.score, self.mass_change = self._of_kind.score, self._of_kind.mass_change
        unset(self.parts, torch.arange(num_pages, device=device))
        self.valid = np.zeros(num_pages, bool)
        self._built: torch.cuda.Event | None = None  # the last ones, on the stream of the steps
        self.received = self.computed = 0

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def compile_kernels(self, host: HostPages, resident: LayerPages) -> None:
        """Compile and load kernels before the first request, using page 0, which is padding."""
        padding = np.zeros(1, np.int64)
        ids, slots = self._ids(padding), self._ids(np.zeros((len(resident.k), 1)))
        for source, rows in ((host.for_copies(self.device), None), (resident, slots)):
            self._of_kind.build(source, ids, rows)
        self.unset(padding)
        self.accept(padding)

    def invalidate(self, pages: PageIds) -> None:
        """The pages were freed: their digests become invalid."""
        self.valid[pages] = False

    def unset(self, pages: PageIds) -> None:
        """Mark the digests of freshly allocated pages as not written."""
        if self._built is not None:  # work launched for the pages' last owners must finish first
            torch.cuda.current_stream().wait_event(self._built)
        unset(self.parts, self._ids(pages))
        self.valid[pages] = False
        if self.hints is not None:
            self.hints.clear(pages)

    def accept(self, pages: PageIds) -> PageIds:
        """Mark those of ``pages`` whose digests have been written as valid; return the others.

        A real page has the word of an unset one with probability 1/65,536; its digest is then rebuilt. The host waits
        for the current stream, which must be that of :meth:`unset` or ordered after it.
        """
        ids = self._ids(pages)
        first, last = (words[:, ids] != UNSET for words in _marks(self.parts))
        complete = (first & last).all(0).cpu().numpy()
        self.valid[pages[complete]] = True
        self.received += int(complete.sum())
        return pages[~complete]

    def build(self, pages: PageIds, host: HostPages) -> None:
        """Compute the digests of ``pages`` from their K."""
        if len(pages):
            self._build(pages, host.for_copies(self.device), self._ids(pages), None)

    def build_from_slots(self, pages: PageIds, resident: LayerPages, slots: PageIds) -> None:
        """Compute the digests of ``pages`` from the K in their ``slots`` ``[L, n]``."""
        if len(pages):
            both = self._ids(np.concatenate([pages[None], slots]))  # one transfer
            self._build(pages, resident, both[0], both[1:])

    def _build(self, pages: PageIds, source: LayerPages, ids: Tensor, rows: Tensor | None) -> None:
        self._of_kind.build(source, ids, rows)
        if self._of_kind.has_mark:
            _marks(self.parts)[1].index_fill_(1, ids, 0)
        if self.device.type == "cuda":
            self._built = torch.cuda.Event()
            self._built.record()
        self.valid[pages] = True
        self.computed += len(pages)

    def _ids(self, pages: PageIds) -> Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)
