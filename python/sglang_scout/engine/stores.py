"""The three stores of a decode worker: host pages (all KV), page digests, and the resident cache.

Shapes: L layers, P host pages (page 0 is padding), S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.forecast import PageWeights
from sglang_scout.core.page_bytes import PILOT_RANK, digest_parts
from sglang_scout.engine.device import upload
from sglang_scout.engine.digest_kinds import KINDS, is_set, score_heads, trained_arrays, unset
from sglang_scout.ops.layers import LayerPages


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one tensor-parallel rank's attention."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    scale: float
    logit_cap: float = 0.0

    @property
    def page_bytes(self) -> int:
        """Bytes of the K (or the V) of one page in one layer."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """What a rank's buffers are made for.

    Attributes:
        budget_pages: k, pages selected per request and layer.
        num_slots: device slots per layer.
        max_batch, max_pages: most rows in a step, and pages of a row.
    """

    budget_pages: int
    num_slots: int
    max_batch: int
    max_pages: int


class HostPages:
    """Every KV page of every request, in host DRAM.

    Args:
        k, v: per layer ``[P * S, H, D]``, as SGLang's pool holds them; viewed here as pages.
    """

    def __init__(
        self,
        shape: ModelShape,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
    ) -> None:
        pages = (-1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.k = [t.view(pages) for t in k]
        self.v = [t.view(pages) for t in v]
        self._for_copies: dict[torch.device, LayerPages] = {}

    def for_copies(self, device: torch.device) -> LayerPages:
        """The pages as the ops take them that read any layer in one launch on ``device``."""
        if device not in self._for_copies:
            self._for_copies[device] = LayerPages.of(self.k, self.v, device)
        return self._for_copies[device]

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]

    def save(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.signedinteger]:
        """A copy of K and V of ``pages`` ``[n]``, ``[2 L, n, S, H, D]``, in memory of its own."""
        planes = self._planes()
        # In one piece: large enough for huge pages, and gone as soon as it is let go.
        saved = np.empty((len(planes), len(pages), *planes[0].shape[1:]), planes[0].dtype)
        runs = list(_runs(pages))
        for copy, plane in zip(saved, planes, strict=True):
            for here, there in runs:
                copy[here] = plane[there]
        return saved

    def restore(self, pages: npt.NDArray[np.int64], saved: npt.NDArray[np.signedinteger]) -> None:
        """Write what :meth:`save` returned to ``pages``, as many as were saved."""
        if len(pages) != saved.shape[1]:
            raise ValueError(f"{saved.shape[1]} pages were saved, cannot restore {len(pages)}")
        runs = list(_runs(pages))
        for copy, plane in zip(saved, self._planes(), strict=True):
            for here, there in runs:
                plane[there] = copy[here]

    def _planes(self) -> list[npt.NDArray[np.signedinteger]]:
        return [as_words(plane) for plane in (*self.k, *self.v)]


def as_words(pages: torch.Tensor) -> npt.NDArray[np.signedinteger]:
    """The same memory as integers of the same size. numpy copies whole pages at the speed of memory;
    torch on the one thread that SGLang leaves to it takes ten times as long."""
    return pages.view({2: torch.int16, 4: torch.int32}[pages.element_size()]).numpy()


def _runs(pages: npt.NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """(where in ``pages``, which pages) of every run of neighbours, in order."""
    cuts = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    for begin, end in itertools.pairwise(cuts):
        first = int(pages[begin]) if begin < end else 0
        yield slice(begin, end), slice(first, first + end - begin)


class DigestPool:
    """The digest of every page, and which of them hold.

    A digest can arrive with the KV from the prefill server or be built here. An unset digest is
    marked in the data itself until somebody writes it, so an arrived digest is recognised without a
    message of its own.

    Args:
        kind: what a digest holds, a key of ``KINDS``.
        weights: this rank's part of a pilot file, for a kind that is trained.

    Attributes:
        kind: as given.
        parts: ``[L, P, H, bytes]`` uint8 each, on ``device``.
        valid: ``[P]`` bool on the host; the digest of every layer of this page holds.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_pages: int,
        device: torch.device | str,
        kind: str,
        weights: PageWeights | None = None,
    ) -> None:
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        self.kind = kind
        self._of_kind = KINDS[kind]
        self._trained = trained_arrays(self._of_kind, weights, device)
        rank = weights.rank if self._trained and weights else PILOT_RANK
        first, second = digest_parts(kind, shape.head_dim, shape.dtype.itemsize, rank)
        self.parts = (
            torch.zeros((*size, first), dtype=torch.uint8, device=device),
            torch.zeros((*size, second), dtype=torch.uint8, device=device),
        )
        self._views = [self._of_kind.view(x, shape.dtype, shape.head_dim) for x in self.parts]
        unset(self.parts, torch.arange(num_pages, device=device))
        self.valid = np.zeros(num_pages, bool)
        self._built: torch.cuda.Event | None = None  # the last ones, on the stream of the steps
        self.received = 0
        self.computed = 0

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def warm_up(self, host: HostPages, resident: LayerPages) -> None:
        """Do what requests need once, before there are any, so that none waits while kernels are compiled
        and loaded. With page 0, which is padding."""
        padding = np.zeros(1, np.int64)
        ids, slots = self._ids(padding), self._ids(np.zeros((len(resident.k), 1)))
        for source, rows in ((host.for_copies(self.device), None), (resident, slots)):
            self._of_kind.build(source, ids, *self._views, rows, *self._trained[:1])
        self.unset(padding)
        self.accept(padding)

    def invalidate(self, pages: npt.NDArray[np.integer]) -> None:
        """The pages were freed: their digests no longer hold."""
        self.valid[pages] = False

    def unset(self, pages: npt.NDArray[np.integer]) -> None:
        """Mark the digests of freshly allocated pages as not written."""
        if self._built is not None:
            # Pages come from requests that have ended; what was launched for them ends first.
            torch.cuda.current_stream().wait_event(self._built)
        unset(self.parts, self._ids(pages))
        self.valid[pages] = False

    def accept(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Mark those of ``pages`` whose digests have been written as valid; return the others.

        The host waits for the current stream, which must be the one of :meth:`unset` or behind it.
        """
        complete = is_set(self.parts, self._ids(pages)).cpu().numpy()
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
        self._of_kind.build(source, ids, *self._views, rows, *self._trained[:1])
        if self.device.type == "cuda":
            self._built = torch.cuda.Event()
            self._built.record()
        self.valid[pages] = True
        self.computed += len(pages)

    def score(
        self,
        layer: int,
        query: torch.Tensor,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        """``[B, N]`` fp32 scores of the full pages in ``table`` for ``query`` ``[B, HQ, D]``.

        Kinds that score per head: as :func:`score_heads`.
        """
        if self._of_kind.per_head:
            w_q = (x[layer] for x in self._trained[1:])
            return score_heads(query, self._views[0][layer], table, n_full, *w_q)
        parts = (view[layer] for view in self._views)
        return self._of_kind.score(query, *parts, table, n_full, scale, head_reduce)

    @property
    def has_estimates(self) -> bool:
        """Whether :meth:`mass_change` is there: scores of this kind estimate, and do not bound."""
        return self._of_kind.log_mass is not None

    def mass_change(
        self,
        layer: int,
        query: torch.Tensor,
        query_ahead: torch.Tensor,
        pages: torch.Tensor,
        n_pages: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """``[B, HQ]`` by how much the log mass of a row's missing pages is larger for the real query; estimated.

        The worker attends to them one layer ahead, with the predicted query, and weighs them by it. What the real
        query asks for may be among them, and gets the mass that it should have.

        Args:
            query, query_ahead: ``[B, HQ, D]`` fp32.
            pages: ``[B, k]``, of which each row has the first ``n_pages`` ``[B]``; 0 for a row without any.
        """
        assert self._of_kind.log_mass is not None
        parts = [view[layer] for view in self._views]
        real, ahead = (
            self._of_kind.log_mass(q, *parts, pages, n_pages, scale) for q in (query, query_ahead)
        )
        return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _ids(self, pages: npt.NDArray[np.integer]) -> torch.Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)


class ResidentCache:
    """Device copies of the important pages: ``k``, ``v`` ``[L, slots, S, H, D]``."""

    def __init__(self, shape: ModelShape, num_slots: int, device: torch.device | str) -> None:
        size = (
            shape.num_layers,
            num_slots,
            shape.page_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.k = torch.zeros(size, dtype=shape.dtype, device=device)
        self.v = torch.zeros(size, dtype=shape.dtype, device=device)

    def as_layers(self) -> LayerPages:
        """The slots as the ops take pages of all layers."""
        return LayerPages.of(self.k.unbind(), self.v.unbind(), self.k.device)
