"""The digests of all pages: their layouts, which are valid, and scores by them.

A page has two parts ``[L, P, H, bytes]``, whose bytes depend on the kind of digest, and which are transferred with K
and V from the prefill server. Shapes: L layers, P pages, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.forecast import PageWeights
from sglang_scout.core.page_bytes import PILOT_RANK, digest_parts
from sglang_scout.engine.device import upload
from sglang_scout.engine.hints import HINT_PAGES, PageHints
from sglang_scout.engine.step_inputs import Candidates
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.embed import build_layer_means, build_layer_pilots, score_embeddings
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.minmax import build_layer_digests, score_pages
from sglang_scout.ops.rotated import Coordinates, build_layer_rotated, planes_shape
from sglang_scout.ops.rotated_scores import mass_change_rotated, score_rotated
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.base import SelectionRule

_MOST_HINT_PAGES = 2**16 - 2  # of a prompt: a position takes 16 bits
Parts = tuple[torch.Tensor, torch.Tensor]
Ids = npt.NDArray[np.integer]

_UNSET = 0x7FC0
"""Sentinel: a NaN in bfloat16, and in any kind two bytes that hardly any page has in both marks."""


class DigestKind:
    """How digests are built and scored. This kind, for policies without page selection, has marks alone.

    Args:
        parts: of the pool, viewed here as the kind's ops expect.
        weights: arrays of the file (``core/forecast.py``) that has the ``trained`` ones; empty for other kinds.

    Attributes:
        mark: the last word of every digest that is written, None: any.
        mass_change: see :meth:`Rotated.mass_change`; None: scores are bounds, not estimates.
    """

    trained: tuple[str, ...] = ()
    mark: int | None = 0
    mass_change: Callable[..., torch.Tensor] | None = None

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[torch.Tensor]) -> None:
        self.first, self.second = parts

    def build(self, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        """As :func:`build_layer_digests`."""
        self.first.index_fill_(1, ids, 0)

    def score(self, layer: int, query: torch.Tensor, of: Candidates, scale: float) -> torch.Tensor:
        """``[B * C, N]`` fp32 scores of each list's candidates, for ``query`` ``[B * C, HQ / C, D]``; undefined where
        the budget covers them all."""
        raise NotImplementedError("pages without digests cannot be scored")


class MinMax(DigestKind):
    """Bounds of each channel, and so of scores."""

    mark = None
    score_op: Callable[..., torch.Tensor] = staticmethod(score_pages)

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[torch.Tensor]) -> None:
        self.first, self.second = (part.view(shape.dtype) for part in parts)

    def build(self, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        build_layer_digests(source, ids, self.first, self.second, rows)

    def trained_of(self, layer: int) -> dict[str, Coordinates]:
        """More arguments of the ops of a layer."""
        return {}

    def score(self, layer: int, query: torch.Tensor, of: Candidates, scale: float) -> torch.Tensor:
        parts = self.first[layer], self.second[layer]
        if of.lists > 1:  # each head's digests as separate pages
            parts = tuple(part.flatten(0, 1).unsqueeze(1) for part in parts)
        pages, more = (of.digest_rows, of.list_n_scored), self.trained_of(layer)
        return self.score_op(query, *parts, *pages, scale, **more)


class Rotated(MinMax):
    """Bits of rotated keys about the page's mean."""

    score_op = staticmethod(score_rotated)
    coordinates: Coordinates | None = None

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[torch.Tensor]) -> None:
        first, self.second = parts
        bits = first.shape[-1] // (4 * shape.head_dim)
        self.first = first.unflatten(-1, planes_shape(bits, shape.head_dim))

    def build(self, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        build_layer_rotated(source, ids, self.first, self.second, rows, self.coordinates)

    def mass_change(
        self,
        layer: int,
        query: torch.Tensor,
        query_ahead: torch.Tensor,
        pages: torch.Tensor,
        n_pages: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """``[B, HQ]`` estimated increase of the log mass of a list's missing pages under the real query.

        The CPU attends to them one layer ahead, weighted by the predicted query. Pages important to the real query
        may be among them, and get the mass that they should have.

        Args:
            query, query_ahead: ``[B, HQ, D]``.
            pages: ``[B * C, k]``, of which each row has the first ``n_pages`` ``[B * C]``; the change is 0 for a row
                without any.
        """
        parts, more = (self.first[layer], self.second[layer]), self.trained_of(layer)
        return mass_change_rotated(query, query_ahead, *parts, pages, n_pages, scale, **more)


class Calibrated(Rotated):
    """The same in coordinates of a file; digests made with another file have another mark."""

    trained = Coordinates._fields

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[torch.Tensor]) -> None:
        super().__init__(parts, shape, weights)
        self.coordinates = Coordinates(*weights)
        self._by_layer = [{"coordinates": Coordinates(*x)} for x in zip(*weights, strict=True)]
        sums = [zlib.crc32(x.cpu().numpy()) for x in weights]
        self.mark = 1 + sum(sums) % (_UNSET - 1)

    def trained_of(self, layer: int) -> dict[str, Coordinates]:
        return self._by_layer[layer]


class Means(DigestKind):
    """Mean keys of a page's halves; each KV head selects with one query vector, and so in the class below."""

    vectors = 2

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[torch.Tensor]) -> None:
        self.first = parts[0].view(shape.dtype).unflatten(-1, (self.vectors, -1))

    def build(self, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        build_layer_means(source, ids, self.first, rows)

    def score(self, layer: int, query: torch.Tensor, of: Candidates, scale: float) -> torch.Tensor:
        vectors = query.reshape(len(of.table) * self.first.shape[2], -1).contiguous()
        return score_embeddings(vectors, self.first[layer], of.table, of.n_scored)


class Pilots(Means):
    """Learned embeddings of pages, and of the real queries of each KV head."""

    trained = ("w_k", "w_q")
    vectors = 1

    def __init__(self, parts: Parts, shape: ModelShape, weights: Sequence[torch.Tensor]) -> None:
        super().__init__(parts, shape, weights)
        self._w_k, self._w_q = weights

    def build(self, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        build_layer_pilots(source, ids, self.first, self._w_k, rows)

    def score(self, layer: int, query: torch.Tensor, of: Candidates, scale: float) -> torch.Tensor:
        by_head = query.reshape(len(of.table), self.first.shape[2], -1).float()
        vectors = torch.einsum("bhx,hrx->bhr", by_head, self._w_q[layer])
        return super().score(layer, vectors, of, scale)


KINDS: dict[str, type[DigestKind]] = {
    "none": DigestKind,
    "minmax": MinMax,
    "mean16": Means,
    "pilot": Pilots,
    "rotated-2": Rotated,
    "calibrated": Calibrated,
}


def _marks(parts: Parts) -> list[torch.Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    first, second = (part.view(torch.int16) for part in parts)
    return [first[:, :, 0, 0], second[:, :, -1, -1]]


def unset(parts: Parts, ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment, which would copy the number from host memory and synchronize the stream.
        mark.index_fill_(1, ids, _UNSET)


class DigestPool:
    """The digest of every page, and which are valid.

    A digest can arrive with the KV from the prefill server or be built here. Until it is written it holds a sentinel,
    by which arrival is recognised. One made with another digest file counts as not arrived.

    Args:
        kind: what a digest holds, a key of ``KINDS``.
        weights: this rank's part of the file of a trained kind.
        hints: whether the prefill server sends hints.

    Attributes:
        kind, trained: as given; arrays of its weights on the device.
        score, mass_change: those of the kind (:class:`DigestKind`).
        parts: ``[L, P, H, bytes]`` uint8 each, on ``device``.
        valid: ``[P]`` bool on the host; this page's digests are valid in every layer.
        hints: of prompts, by their last pages; None: no hints.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_pages: int,
        device: torch.device | str,
        kind: str,
        weights: PageWeights | None = None,
        hints: bool = False,
    ) -> None:
        of_kind = KINDS[kind]
        if of_kind.trained and weights is None:
            raise ValueError(
                "this kind of digest needs the weights of a pilot_file or a digest_file"
            )
        arrays = weights.arrays if weights is not None else {}
        self.kind = kind
        self.trained = [torch.tensor(arrays[name], device=device) for name in of_kind.trained]
        rank = weights.rank if weights is not None and kind == "pilot" else PILOT_RANK
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        first, second = digest_parts(kind, shape.head_dim, shape.dtype.itemsize, rank)
        self.parts = (
            torch.zeros((*size, first), dtype=torch.uint8, device=device),
            torch.zeros((*size, second), dtype=torch.uint8, device=device),
        )
        self._of_kind = of_kind(self.parts, shape, self.trained)
        self.score, self.mass_change = self._of_kind.score, self._of_kind.mass_change
        unset(self.parts, torch.arange(num_pages, device=device))
        self.hints = PageHints(*size[:2]) if hints else None
        self.valid = np.zeros(num_pages, bool)
        self._built: torch.cuda.Event | None = None  # the last ones, on the stream of the steps
        self.received = 0
        self.computed = 0

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

    def invalidate(self, pages: Ids) -> None:
        """The pages were freed: their digests become invalid."""
        self.valid[pages] = False

    def unset(self, pages: Ids) -> None:
        """Mark the digests of freshly allocated pages as not written."""
        if self._built is not None:  # work launched for the pages' last owners must finish first
            torch.cuda.current_stream().wait_event(self._built)
        unset(self.parts, self._ids(pages))
        self.valid[pages] = False
        if self.hints is not None:
            self.hints.clear(pages)

    def accept(self, pages: Ids) -> Ids:
        """Mark those of ``pages`` whose digests have been written as valid; return the others.

        A real page has the word of an unset one with probability 1/65,536; its digest is then rebuilt. The host waits
        for the current stream, which must be that of :meth:`unset` or ordered after it.
        """
        mark, ids = self._of_kind.mark, self._ids(pages)
        first, last = (words[:, ids] for words in _marks(self.parts))
        wrong = (first == _UNSET) | (last == _UNSET if mark is None else last != mark)
        complete = ~wrong.any(0).cpu().numpy()
        self.valid[pages[complete]] = True
        self.received += int(complete.sum())
        return pages[~complete]

    def build(self, pages: Ids, host: HostPages) -> None:
        """Compute the digests of ``pages`` from their K."""
        if len(pages):
            self._build(pages, host.for_copies(self.device), self._ids(pages), None)

    def build_from_slots(self, pages: Ids, resident: LayerPages, slots: Ids) -> None:
        """Compute the digests of ``pages`` from the K in their ``slots`` ``[L, n]``."""
        if len(pages):
            both = self._ids(np.concatenate([pages[None], slots]))  # one transfer
            self._build(pages, resident, both[0], both[1:])

    def _build(
        self, pages: Ids, source: LayerPages, ids: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        self._of_kind.build(source, ids, rows)
        if self._of_kind.mark is not None:
            _marks(self.parts)[1].index_fill_(1, ids, self._of_kind.mark)
        if self.device.type == "cuda":
            self._built = torch.cuda.Event()
            self._built.record()
        self.valid[pages] = True
        self.computed += len(pages)

    def _ids(self, pages: Ids) -> torch.Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)


def choose_hint(
    digests: DigestPool, queries: torch.Tensor, pages: Ids, rule: SelectionRule, scale: float
) -> npt.NDArray[np.int32] | None:
    """``[L, k]`` positions of the pages that a decode step with these ``queries`` would select, by this rank's heads.

    Args:
        digests: valid ones, of ``pages`` ``[N]``, the prompt's full pages.
        queries: ``[L, HQ, D]`` fp32 real queries of its last token, after RoPE.
    Returns:
        None for a prompt without a full page, or too long for 16 bits.
    """
    if not 0 < len(pages) <= _MOST_HINT_PAGES:
        return None
    layers, device = len(queries), digests.device
    table = upload(np.ascontiguousarray(pages[None], np.int32), device)
    n_full = torch.full((layers,), len(pages), dtype=torch.int32, device=device)
    candidates = Candidates.of(table, n_full[:1], 1)
    scores = [
        digests.score(layer, queries[layer : layer + 1], candidates, scale)
        for layer in range(layers)
    ]
    places = torch.arange(len(pages), dtype=torch.int32, device=device)
    chosen = select_pages(
        torch.cat(scores),
        places.repeat(layers, 1),
        n_full,
        torch.zeros_like(places),
        HINT_PAGES,
        rule.sink_pages,
        rule.recent_pages,
        rule.mass,
    )
    return chosen.pages.cpu().numpy()
