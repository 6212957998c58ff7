"""The digests of all pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.forecast import PageWeights
from sglang_scout.core.page_bytes import PILOT_RANK, digest_parts
from sglang_scout.engine.device import upload
from sglang_scout.engine.digest_kinds import KINDS, is_set, score_heads, trained_arrays, unset
from sglang_scout.engine.hints import PageHints
from sglang_scout.engine.offered import Offered
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import digits_bytes
from sglang_scout.ops.triton import interpreted


class DigestPool:
    """The digest of every page, and which are valid.

    A digest can arrive with the KV from the prefill server or be built here. An unset digest holds a sentinel in its
    data until it is written, so an arrived digest is recognised without a separate message.

    Args:
        kind: what a digest holds, a key of ``KINDS``.
        weights: this rank's part of a pilot file, for a trained kind.
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
        rank = weights.rank if self._trained and weights else PILOT_RANK
        first, second = digest_parts(kind, shape.head_dim, shape.dtype.itemsize, rank)
        self.parts = (
            torch.zeros((*size, first), dtype=torch.uint8, device=device),
            torch.zeros((*size, second), dtype=torch.uint8, device=device),
        )
        self._heads = shape.num_q_heads
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
            self._of_kind.build(source, ids, *self._views, rows, *self._trained[:1])
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

    def query_digits(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Where the kernel that makes a query can write its digits for :meth:`score`, ``[rows, HQ, bytes]``; nothing
        if scores take none, as on the CPU."""
        if not self._of_kind.takes_digits or (self.device.type == "cpu" and not interpreted()):
            return ()
        bits, _, quarter = self._views[0].shape[-3:]
        size = rows, self._heads, digits_bytes(bits, 4 * quarter)
        return (torch.empty(size, dtype=torch.uint8, device=self.device),)

    def score(
        self,
        layer: int,
        query: torch.Tensor,
        offered: Offered,
        scale: float,
        head_reduce: str,
        digits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[B * C, N]`` fp32 scores of the pages offered to each list, for ``query`` ``[B * C, HQ / C, D]``; undefined
        where the budget covers them all. ``digits``: of the query, grouped alike, from :meth:`query_digits`."""
        if self._of_kind.per_head:
            w_q = (x[layer] for x in self._trained[1:])
            pages = offered.table, offered.n_scored
            return score_heads(query, self._views[0][layer], *pages, *w_q)
        parts = self._of_lists(layer, offered.lists)
        pages = offered.digest_rows, offered.list_n_scored
        given = {} if digits is None else {"digits": digits}
        return self._of_kind.score(
            query, *parts, *pages, scale, head_reduce, arrivals=offered.arrivals, **given
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
        return self._of_kind.mass_change(query, query_ahead, *parts, pages, n_pages, scale)

    def _ids(self, pages: npt.NDArray[np.integer]) -> torch.Tensor:
        return upload(np.ascontiguousarray(pages, np.int64), self.device)
