"""The step boundary: everything that the host decides about a step, before it begins.

Recalls are committed, digests completed, forced pages made resident, room made for the recalls to
come; then the page tables are fixed, and nothing changes residency until the next boundary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.pages import ResidencyTable
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape
from sglang_scout.engine.recall import Recall
from sglang_scout.policy.axes import Policy


@dataclass
class Batch:
    """What the boundary fixed for the step; N = pages of the longest request."""

    table: torch.Tensor  # [B, N] int32 host page ids, -1 beyond the last page
    n_full: torch.Tensor  # [B] int32 full pages, candidates for selection
    slots: torch.Tensor  # [L, B, N] int32 resident slots of full pages, -1 elsewhere
    tail_slot: torch.Tensor  # [L, B] int32 slot of the page being filled
    tail_len: torch.Tensor  # [B] int32 valid tokens in it, this step's included
    tail_page: npt.NDArray[np.int64]  # [B]
    fresh: npt.NDArray[np.bool_]  # [B] requests in their first step here


class StepBoundary:
    """Follows the lives of requests and pages and prepares each step.

    Args:
        shape, policy, budget_pages: as of :class:`StepEngine`.
        host, digests, table: the stores and their books.
        recall: moves pages to the device.
        counters: totals to add to.
    """

    def __init__(
        self,
        shape: ModelShape,
        policy: Policy,
        budget_pages: int,
        host: HostPages,
        digests: DigestPool,
        table: ResidencyTable,
        recall: Recall,
        counters: Counters,
    ) -> None:
        self._shape = shape
        self._policy = policy
        self._budget_pages = budget_pages
        self._host = host
        self._digests = digests
        self._table = table
        self._recall = recall
        self._counters = counters
        self._step = 0
        self._fresh_requests: set[int] = set()

    def admit(self, request_slots: Iterable[int]) -> None:
        """Requests join the batch, new or after a retraction; ``request_slots`` are their table rows."""
        self._fresh_requests.update(int(r) for r in request_slots)

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages were handed to a request that is about to receive them."""
        self._digests.poison(pages)

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages went back to the allocator: nothing that is known about them holds any more."""
        self._digests.invalidate(pages)
        self._table.invalidate(pages)

    def clear(self) -> None:
        """All pages were freed (cache flush)."""
        self.free_pages(np.arange(self._host.num_pages))

    def begin(
        self,
        step: int,
        page_table: npt.NDArray[np.int32],
        request_slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        last_missing: npt.NDArray[np.int64],
    ) -> Batch:
        """Prepare a step. Arguments as of :meth:`StepEngine.begin_step`, and

        Args:
            step: number of the step, ascending.
            last_missing: ``[L]`` pages that each layer missed in the step before.
        """
        self._step = step
        self._recall.commit(step)
        rows, columns = page_table.shape
        size = self._shape.page_size
        last = (seq_lens - 1) // size
        tail_len = (seq_lens - 1) % size + 1
        column = np.arange(columns)
        table = np.where(column <= last[:, None], page_table, -1).astype(np.int32)
        is_full = column < last[:, None]
        tail_page = table[np.arange(rows), last].astype(np.int64)
        fresh = np.array([int(r) in self._fresh_requests for r in request_slots], bool)
        self._fresh_requests.difference_update(int(r) for r in request_slots)

        self._complete_digests(table[is_full])
        self._load_forced(table, last, tail_page, fresh)
        self._make_room(fresh, last_missing)

        # np.take, unlike fancy indexing, returns rows that are contiguous, as the kernels want them.
        slots = np.take(self._table.slot_of, table, axis=1)
        slots[:, ~is_full] = -1
        return Batch(
            table=torch.from_numpy(table),
            n_full=torch.from_numpy(last.astype(np.int32)),
            slots=torch.from_numpy(slots),
            tail_slot=torch.from_numpy(np.take(self._table.slot_of, tail_page, axis=1)),
            tail_len=torch.from_numpy(tail_len.astype(np.int32)),
            tail_page=tail_page,
            fresh=fresh,
        )

    def _complete_digests(self, pages: npt.NDArray[np.int32]) -> None:
        """Every full page needs a digest: taken from the prefill server, else computed here."""
        pending = np.unique(pages[~self._digests.valid[pages]]).astype(np.int64)
        if len(pending):
            self._digests.build(self._digests.accept(pending), self._host.k)

    def _load_forced(
        self,
        table: npt.NDArray[np.int32],
        last: npt.NDArray[np.int64],
        tail_page: npt.NDArray[np.int64],
        fresh: npt.NDArray[np.bool_],
    ) -> None:
        """Sink, newest and tail pages of every request are resident; fresh requests that fit, whole."""
        digest = self._policy.digest
        column = np.arange(table.shape[1])
        forced = (column < digest.sink_pages) | (column >= last[:, None] - digest.recent_pages)
        forced = np.concatenate([table[forced & (column < last[:, None])], tail_page])
        self._table.touch_all_layers(forced, self._step)
        warm = [
            table[row, self._policy.residency.warm_columns(int(last[row]), self._budget_pages)]
            for row in np.flatnonzero(fresh)
        ]
        wanted = np.concatenate([forced, *warm])
        if (self._table.slot_of[:, wanted] >= 0).all():
            return
        for layer in range(self._shape.num_layers):
            # Forced pages may push out anything else, warm ones only what was not just in use.
            for pages, before in ((forced, self._step), (wanted, self._step - 1)):
                absent = self._table.missing(layer, pages)
                self._table.evict(layer, len(absent), before)
                loaded = self._recall.load_now(layer, absent, self._step)
                self._counters.warmed_pages += loaded
        if (self._table.slot_of[:, forced] < 0).any():
            raise RuntimeError("no slot for a page that must be resident; the slot count is wrong")

    def _make_room(self, fresh: npt.NDArray[np.bool_], last_missing: npt.NDArray[np.int64]) -> None:
        """Free slots for the recalls that this step will start, from pages not of use lately."""
        first = (
            int(fresh.sum()) * self._budget_pages if self._policy.residency.recall_fresh() else 0
        )
        copy_ahead = self._policy.missing.copy_ahead
        for layer in range(self._shape.num_layers):
            want = first
            if copy_ahead or self._policy.residency.due(layer, self._step):
                want = max(want, int(last_missing[layer]) + first)
            if want:
                self._table.evict(layer, want, self._step - 1)
