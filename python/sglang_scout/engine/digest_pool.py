"""The digests of all pages: their layouts, which are valid, and scores by them.

A page has two parts ``[L, P, H, bytes]``, whose bytes depend on the kind of digest, and which are transferred with K
and V from the prefill server. Shapes: L layers, P pages, n of them, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.forecast import PageWeights
from sglang_scout.core.page_bytes import MARK_BYTES, PILOT_RANK, digest_parts
from sglang_scout.engine.device import upload
from sglang_scout.engine.hints import HINT_PAGES, PageHints
from sglang_scout.engine.step_inputs import Candidates
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.embed import build_layer_means, build_layer_pilots, score_embeddings
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import (
    Coordinates,
    build_layer_rotated,
    mass_change_rotated,
    planes_shape,
    score_rotated,
)
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.base import SelectionRule

_MOST_HINT_PAGES = 2**16 - 2  # of a prompt: a position takes 16 bits
_UNSET = 0x7FC0
"""Sentinel: a NaN in bfloat16, and in any kind two bytes that hardly any page has in both marks."""


@dataclass(frozen=True)
class DigestKind:
    """How digests are built and scored.

    Attributes:
        build: as :func:`build_layer_digests`; of trained kinds with W_k or the coordinates behind its arguments.
        score: as :func:`score_pages`, of the parts of one layer; of kinds ``per_head`` see :func:`score_heads`.
        mass_change: as :func:`mass_change_rotated`; None where scores are bounds.
        view: the parts as both of them expect, from bytes, the model's dtype and D.
        per_head: each KV head selects pages with one query vector.
        trained: arrays of a file (``core/forecast.py``) that it is built and scored with.
    """

    build: Callable[..., None]
    score: Callable[..., torch.Tensor]
    mass_change: Callable[..., torch.Tensor] | None
    view: Callable[[torch.Tensor, torch.dtype, int], torch.Tensor]
    per_head: bool = False
    trained: tuple[str, ...] = ()


def _bounds(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    return part.view(dtype)


def _rotated(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    bits, left = divmod(part.shape[-1], 4 * head_dim)
    return part if left else part.unflatten(-1, planes_shape(bits, head_dim))


def _embeddings(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    is_mark = part.shape[-1] == MARK_BYTES
    return part if is_mark else part.view(dtype).unsqueeze(-2)


def _two_means(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    is_mark = part.shape[-1] == MARK_BYTES
    return part if is_mark else part.view(dtype).unflatten(-1, (2, head_dim))


def _and_mark(build: Callable[..., None]) -> Callable[..., None]:
    """``build`` of embeddings, then the marks that they were written."""

    def both(
        source: LayerPages,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        marks: torch.Tensor,
        rows: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> None:
        build(source, ids, embeddings, *weights, rows)
        marks.index_fill_(1, ids, 0)

    return both


def _build_marks(
    source: LayerPages,
    ids: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """For policies without page selection."""
    for marks in (first, second):
        marks.index_fill_(1, ids, 0)


def _score_nothing(*args: object) -> torch.Tensor:
    raise NotImplementedError("pages without digests cannot be scored")


KINDS = {
    "none": DigestKind(_build_marks, _score_nothing, None, lambda part, dtype, head_dim: part),
    "minmax": DigestKind(build_layer_digests, score_pages, None, _bounds),
    "mean16": DigestKind(
        _and_mark(build_layer_means), score_embeddings, None, _two_means, per_head=True
    ),
    "pilot": DigestKind(
        _and_mark(build_layer_pilots),
        score_embeddings,
        None,
        _embeddings,
        per_head=True,
        trained=("w_k", "w_q"),
    ),
    "rotated-2": DigestKind(build_layer_rotated, score_rotated, mass_change_rotated, _rotated),
    "calibrated": DigestKind(
        build_layer_rotated,
        score_rotated,
        mass_change_rotated,
        _rotated,
        trained=Coordinates._fields,
    ),
}


def trained_arrays(
    kind: DigestKind, weights: PageWeights | None, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """The arrays of a trained kind on ``device``, nothing for others.

    Raises:
        ValueError: weights are missing.
    """
    if not kind.trained:
        return ()
    if weights is None:
        raise ValueError("this kind of digest needs the weights of a pilot_file or a digest_file")
    return tuple(torch.tensor(weights.arrays[name], device=device) for name in kind.trained)


def mark_of(weights: PageWeights) -> int:
    """The last word of digests made with these weights, so that those made with others are told apart."""
    sums = [zlib.crc32(np.ascontiguousarray(x)) for _, x in sorted(weights.arrays.items())]
    return 1 + sum(sums) % (_UNSET - 1)


def score_heads(
    query: torch.Tensor,
    embeddings: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    w_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B * H, N]`` scores per KV head, row b * H + h; see :func:`score_embeddings`.

    Args:
        query: ``[B, H, D]``, one vector per KV head; with ``w_q`` ``[H, r, G * D]`` the real queries ``[B, HQ, D]``.
    """
    query = query.reshape(len(table), embeddings.shape[1], -1)
    if w_q is not None:
        query = torch.einsum("bhx,hrx->bhr", query.float(), w_q)
    return score_embeddings(query.flatten(0, 1).contiguous(), embeddings, table, n_full)


def _marks(parts: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    first, second = (part.view(torch.int16) for part in parts)
    return [first[:, :, 0, 0], second[:, :, -1, -1]]


def unset(parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment, which would copy the number from host memory and synchronize the stream.
        mark.index_fill_(1, ids, _UNSET)


def set_mark(parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor, mark: int) -> None:
    """The last word of rows ``ids`` of all layers."""
    _marks(parts)[1].index_fill_(1, ids, mark)


def is_set(
    parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor, mark: int | None
) -> torch.Tensor:
    """``[n]`` bool: pages whose rows of all layers were written since :func:`unset`, with ``mark`` as the last word if
    that is given.

    A real page has the word of an unset one with probability 1/65,536; its digest is then rebuilt.
    """
    first, last = (words[:, ids] for words in _marks(parts))
    wrong = (first == _UNSET) | (last == _UNSET if mark is None else last != mark)
    return ~wrong.any(0)


class DigestPool:
    """The digest of every page, and which are valid.

    A digest can arrive with the KV from the prefill server or be built here. An unset digest holds a sentinel in its
    data until it is written, so an arrived digest is recognised without a separate message. One made with another
    server's digest file counts as not arrived.

    Args:
        kind: what a digest holds, a key of ``KINDS``.
        weights: this rank's part of the file of a trained kind.
        hints: whether the prefill server sends hints.

    Attributes:
        kind: as given.
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
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        self.kind = kind
        self._of_kind = KINDS[kind]
        self._trained = trained_arrays(self._of_kind, weights, device)
        rank, self._of_build = PILOT_RANK, self._trained[:1]
        self._mark: int | None = None
        self._of_layer: list[dict[str, Coordinates]] = [{}] * shape.num_layers
        if weights is not None and kind == "pilot":
            rank = weights.rank
        if weights is not None and kind == "calibrated":
            self._mark, self._of_build = mark_of(weights), (Coordinates(*self._trained),)
            of_layers = zip(*self._trained, strict=True)
            self._of_layer = [{"coordinates": Coordinates(*x)} for x in of_layers]
        first, second = digest_parts(kind, shape.head_dim, shape.dtype.itemsize, rank)
        self.parts = (
            torch.zeros((*size, first), dtype=torch.uint8, device=device),
            torch.zeros((*size, second), dtype=torch.uint8, device=device),
        )
        self._views = [self._of_kind.view(x, shape.dtype, shape.head_dim) for x in self.parts]
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
            self._of_kind.build(source, ids, *self._views, rows, *self._of_build)
        self.unset(padding)
        self.accept(padding)

    def invalidate(self, pages: npt.NDArray[np.integer]) -> None:
        """The pages were freed: their digests become invalid."""
        self.valid[pages] = False

    def unset(self, pages: npt.NDArray[np.integer]) -> None:
        """Mark the digests of freshly allocated pages as not written."""
        if self._built is not None:
            # Pages may come from ended requests; work launched for those must finish first.
            torch.cuda.current_stream().wait_event(self._built)
        unset(self.parts, self._ids(pages))
        self.valid[pages] = False
        if self.hints is not None:
            self.hints.clear(pages)

    def accept(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Mark those of ``pages`` whose digests have been written as valid; return the others.

        The host waits for the current stream, which must be that of :meth:`unset` or ordered after it.
        """
        complete = is_set(self.parts, self._ids(pages), self._mark).cpu().numpy()
        self.valid[pages[complete]] = True
        self.received += int(complete.sum())
        return pages[~complete]

    def build(self, pages: npt.NDArray[np.int64], host: HostPages) -> None:
        """Compute the digests of ``pages`` from their K."""
        if len(pages):
            self._build(pages, host.for_copies(self.device), self._ids(pages), None)

    def build_from_slots(
        self, pages: npt.NDArray[np.int64], resident: LayerPages, slots: npt.NDArray[np.integer]
    ) -> None:
        """Compute the digests of ``pages`` from the K in their ``slots`` ``[L, n]``."""
        if len(pages):
            both = self._ids(np.concatenate([pages[None], slots]))  # one transfer
            self._build(pages, resident, both[0], both[1:])

    def _build(
        self,
        pages: npt.NDArray[np.int64],
        source: LayerPages,
        ids: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> None:
        self._of_kind.build(source, ids, *self._views, rows, *self._of_build)
        if self._mark is not None:
            set_mark(self.parts, ids, self._mark)
        if self.device.type == "cuda":
            self._built = torch.cuda.Event()
            self._built.record()
        self.valid[pages] = True
        self.computed += len(pages)

    def score(
        self,
        layer: int,
        query: torch.Tensor,
        candidates: Candidates,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        """``[B * C, N]`` fp32 scores of each list's candidates, for ``query`` ``[B * C, HQ / C, D]``; undefined where
        the budget covers them all."""
        if self._of_kind.per_head:
            w_q = (x[layer] for x in self._trained[1:])
            pages = candidates.table, candidates.n_scored
            return score_heads(query, self._views[0][layer], *pages, *w_q)
        parts = self._of_lists(layer, candidates.lists)
        pages = candidates.digest_rows, candidates.list_n_scored
        return self._of_kind.score(
            query,
            *parts,
            *pages,
            scale,
            head_reduce,
            arrivals=candidates.arrivals,
            **self._of_layer[layer],
        )

    def _of_lists(self, layer: int, lists: int) -> list[torch.Tensor]:
        """The parts of a layer; with one list per KV head, each head's digests as separate pages."""
        parts = [view[layer] for view in self._views]
        return parts if lists == 1 else [part.flatten(0, 1).unsqueeze(1) for part in parts]

    @property
    def has_estimates(self) -> bool:
        """Whether :meth:`mass_change` is available: scores of this kind are estimates, not bounds."""
        return self._of_kind.mass_change is not None

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
        assert self._of_kind.mass_change is not None
        parts = (view[layer] for view in self._views)
        asked = query, query_ahead, *parts, pages, n_pages, scale
        return self._of_kind.mass_change(*asked, **self._of_layer[layer])

    def _ids(self, pages: npt.NDArray[np.integer]) -> torch.Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)


def choose_hint(
    digests: DigestPool,
    queries: torch.Tensor,
    pages: npt.NDArray[np.integer],
    rule: SelectionRule,
    scale: float,
) -> npt.NDArray[np.int32] | None:
    """``[L, k]`` positions of the pages that a decode step with these ``queries`` would select.

    With tensor parallelism only this rank's heads count.

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
        digests.score(layer, queries[layer : layer + 1], candidates, scale, rule.head_reduce)
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
