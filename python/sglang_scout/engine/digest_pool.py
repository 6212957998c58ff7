"""The digests of all pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.forecast import PageWeights
from sglang_scout.core.page_bytes import PILOT_RANK, digest_parts
from sglang_scout.engine.device import upload
from sglang_scout.engine.digest_kinds import (
    KINDS,
    is_set,
    mark_of,
    score_heads,
    set_mark,
    trained_arrays,
    unset,
)
from sglang_scout.engine.hints import PageHints
from sglang_scout.engine.offered import Offered
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import Coordinates


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

    def warm_up(self, host: HostPages, resident: LayerPages) -> None:
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
        self, layer: int, query: torch.Tensor, offered: Offered, scale: float, head_reduce: str
    ) -> torch.Tensor:
        """``[B * C, N]`` fp32 scores of the pages offered to each list, for ``query`` ``[B * C, HQ / C, D]``; undefined
        where the budget covers them all."""
        if self._of_kind.per_head:
            w_q = (x[layer] for x in self._trained[1:])
            pages = offered.table, offered.n_scored
            return score_heads(query, self._views[0][layer], *pages, *w_q)
        parts = self._of_lists(layer, offered.lists)
        pages = offered.digest_rows, offered.list_n_scored
        return self._of_kind.score(
            query, *parts, *pages, scale, head_reduce, arrivals=offered.arrivals, **self._of_layer[layer]
        )  # fmt: skip

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
