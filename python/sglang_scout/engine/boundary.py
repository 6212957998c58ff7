"""The step boundary: everything that the host decides about a step, before it begins.

Recalls are committed, digests completed, forced pages made resident, the recalls of the step decided;
then the page tables are fixed, and what the step attends to does not change until the next boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.ranking import distinct, rank_within
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape
from sglang_scout.engine.recall import Recall
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.axes import Policy, StepReport


@dataclass
class Batch:
    """What the boundary fixed for the step; N = pages of the longest request."""

    table: torch.Tensor  # [B, N] int32 host page ids, -1 beyond the last page
    n_full: torch.Tensor  # [B] int32 full pages, candidates for selection
    slots: torch.Tensor | None  # [L, B, N] int32 resident slots of full pages, -1 elsewhere
    tail_slot: torch.Tensor  # [L, B] int32 slot of the page being filled
    tail_len: torch.Tensor  # [B] int32 valid tokens in it, this step's included
    tail_page: torch.Tensor  # [B] int32 host page id of it
    ages: npt.NDArray[np.int64]  # [B] steps that each request has done here before this one

    @property
    def fresh(self) -> npt.NDArray[np.bool_]:
        """``[B]`` requests in their first step here."""
        return self.ages == 0


@dataclass
class LastStep:
    """What the last step whose selections are known has missed."""

    ages: npt.NDArray[np.int64]  # [B]
    missed: npt.NDArray[np.int64]  # [L, B] pages

    @classmethod
    def none(cls, num_layers: int) -> LastStep:
        """Before there was one."""
        return cls(np.zeros(0, np.int64), np.zeros((num_layers, 0), np.int64))


class StepBoundary:
    """Follows the lives of requests and pages and prepares each step.

    Args:
        shape, policy, budget_pages: as of :class:`StepEngine`.
        host, digests, table: the stores and their books.
        recall: moves pages to the device.
        counters: totals to add to.
        slots_on_host: whether batches say which slots their pages have; a device that keeps a copy of
            the residency table looks there.
        resident: the resident cache, where K of a page that has filled is nearer than in its host page; None:
            it is not.
        known_after: boundaries until a step has surely ended: this one has waited for its results.

    Attributes:
        freed_at: ``[P]`` the last step that had begun when each page was last freed, -1: never.
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
        slots_on_host: bool = True,
        resident: LayerPages | None = None,
        known_after: int = 1,
    ) -> None:
        self._shape = shape
        self._policy = policy
        self._budget_pages = budget_pages
        self._host = host
        self._digests = digests
        self._table = table
        self._recall = recall
        self._counters = counters
        self._slots_on_host = slots_on_host
        self._resident = resident
        self._filled_here = np.zeros(host.num_pages, bool)  # by decoding, so no digest was sent
        self.freed_at = np.full(host.num_pages, -1, np.int64)
        self._last_freed = -1  # the largest of them
        self._written: deque[npt.NDArray[np.int64]] = deque(maxlen=known_after)  # by the last steps
        self._step = 0
        self._seen_full: dict[int, int] = {}  # by table row: full pages at the last boundary
        self._first_step: dict[int, int] = {}  # by table row; 0: joins with the next step

    def admit(self, request_slots: Iterable[int], full_pages: npt.NDArray[np.integer]) -> None:
        """Requests join the batch, new or after a retraction: take the digests that came with their KV.

        The host waits for what the device says of them. Here and not at the boundary, whose stream has a
        step to end first: on a device this runs on the stream that the pages were handed out on.

        Args:
            request_slots: their table rows.
            full_pages: ``[n]`` all full pages of theirs, shared ones too.
        """
        self._first_step.update((int(r), 0) for r in request_slots)
        unknown = ~self._digests.valid[full_pages] & ~self._filled_here[full_pages]
        if not unknown.any():
            return
        self._digests.accept(distinct(full_pages[unknown]))

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages were handed to a request that is about to receive them."""
        self._digests.poison(pages)

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages went back to the allocator: nothing that is known about them holds any more."""
        self._digests.invalidate(pages)
        self._table.invalidate(pages)
        self._filled_here[pages] = False
        self.freed_at[pages] = self._last_freed = self._step

    def still_held(self, step: int, *pages: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """``pages`` as they are, but -1 for those that were freed since ``step`` began."""
        if self._last_freed < step:
            return list(pages)
        is_held = np.append(self.freed_at < step, False)  # the last: of what is no page
        return [np.where(is_held[some], some, -1) for some in pages]

    def may_be_written(self, pages: npt.NDArray[np.int64]) -> bool:
        """Whether a step that may still run writes to some of ``pages``, or to their digests.

        SGLang takes in the results of a step, and frees the pages of requests that it ended, when it has
        launched the next one with them. Of all that a step does, ``append_tokens`` alone writes to host
        pages: one token to each row's tail page, which its boundary has fixed; rows without a request have
        none. Its boundary launches what writes the digests of pages that were found to lack them. So a
        step writes to these, whoever they belong to by then, and to no others. And a boundary ends when the
        results of the step ``known_after`` before it have come, so that only the last ``known_after`` steps
        may run. Pages that had their digests before, a request's or the radix cache's, are none of them.
        """
        return any(bool(np.isin(pages, written).any()) for written in self._written)

    def clear(self) -> None:
        """All pages were freed (cache flush)."""
        self.free_pages(np.arange(self._host.num_pages))

    def begin(
        self,
        step: int,
        page_table: npt.NDArray[np.int32],
        request_slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        last: LastStep,
        step_us: float,
    ) -> Batch:
        """Prepare a step. Arguments as of :meth:`StepEngine.begin_step`, and

        Args:
            step: number of the step, ascending.
            last: the last step whose selections are known.
            step_us: smoothed time of a step; 0 until known.
        """
        self._step = step
        residency = self._policy.residency
        self._recall.commit(step, residency.patience_us)
        rows = len(page_table)
        size = self._shape.page_size
        full = (seq_lens - 1) // size
        tail_len = (seq_lens - 1) % size + 1
        table = page_table.astype(np.int32)
        for row, end in enumerate((full + 1).tolist()):
            table[row, end:] = -1
        tail_page = table[np.arange(rows), full]
        ages = self._ages(request_slots)
        fresh = ages == 0

        seen = self._seen_before(request_slots, full, fresh)
        new = [table[row, seen[row] : full[row]] for row in np.flatnonzero(seen < full)]
        built = self._complete_digests(np.concatenate([np.zeros(0, np.int32), *new]))
        self._filled_here[tail_page] = True
        self._written.append(np.concatenate([tail_page, built]))
        self._load_forced(table, full, tail_page, tail_len, fresh)
        if self._policy.missing.copy_ahead:
            self._make_room(fresh, last.missed)
        residency.plan(self._report(last, fresh, step_us))

        slots = self._slots(table, full) if self._slots_on_host else None
        self._fill_free_slots(table, full)
        return Batch(
            table=torch.from_numpy(table),
            n_full=torch.from_numpy(full.astype(np.int32)),
            slots=None if slots is None else torch.from_numpy(slots),
            tail_slot=torch.from_numpy(np.take(self._table.slot_of, tail_page, axis=1)),
            tail_len=torch.from_numpy(tail_len.astype(np.int32)),
            tail_page=torch.from_numpy(tail_page),
            ages=ages,
        )

    def _slots(
        self, table: npt.NDArray[np.int32], full: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        # np.take, unlike fancy indexing, returns rows that are contiguous, as the kernels want them.
        slots = np.take(self._table.slot_of, table, axis=1)
        slots[:, np.arange(table.shape[1]) >= full[:, None]] = -1
        return slots

    def _ages(self, request_slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """``[B]`` steps done here by each request; one that was never admitted counts as old."""
        slots = request_slots.tolist()
        first = np.array([self._first_step.get(slot, -(2**31)) for slot in slots], np.int64)
        for row in np.flatnonzero(first == 0):
            self._first_step[slots[row]] = first[row] = self._step
        return self._step - first

    def _seen_before(
        self,
        request_slots: npt.NDArray[np.int64],
        full: npt.NDArray[np.int64],
        fresh: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """``[B]`` how many pages of each request were full at the last boundary."""
        slots = request_slots.tolist()
        seen = np.array([self._seen_full.get(slot, 0) for slot in slots])
        self._seen_full = dict(zip(slots, full.tolist(), strict=True))
        return np.where(fresh, 0, seen)

    def _report(self, last: LastStep, fresh: npt.NDArray[np.bool_], step_us: float) -> StepReport:
        """What the residency axis may know."""
        recall = self._recall
        report = StepReport(
            step=self._step,
            budget_pages=self._budget_pages,
            ages=last.ages,
            missed=last.missed,
            fresh_rows=int(fresh.sum()),
            started=recall.started.copy(),
            landed=recall.landed.copy(),
            used=recall.used.copy(),
            late_pages=recall.late_pages,
            step_us=step_us,
            link_pages_per_us=recall.link_pages_per_us,
        )
        recall.started[:] = 0
        return report

    def _complete_digests(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Every full page needs a digest: what has not come with its KV is computed here.

        Returns:
            Which pages those were.
        """
        pending = distinct(pages[~self._digests.valid[pages]])
        elsewhere = pending
        if self._resident is not None:
            # A page that the last step has filled is in its tail's slot still.
            slots = np.take(self._table.slot_of, pending, axis=1)
            is_here = (slots >= 0).all(axis=0)
            elsewhere = pending[~is_here]
            self._digests.build_from_slots(pending[is_here], self._resident, slots[:, is_here])
        self._digests.build(elsewhere, self._host)
        return pending

    def _load_forced(
        self,
        table: npt.NDArray[np.int32],
        full: npt.NDArray[np.int64],
        tail_page: npt.NDArray[np.int32],
        tail_len: npt.NDArray[np.int64],
        fresh: npt.NDArray[np.bool_],
    ) -> None:
        """Sink, newest and tail pages of every request are resident; fresh requests that fit, whole."""
        digest = self._policy.digest
        first, newest = np.arange(digest.sink_pages), np.arange(1, digest.recent_pages + 1)
        columns = np.concatenate(
            [np.broadcast_to(first, (len(full), len(first))), full[:, None] - newest], axis=1
        )
        rows, which = np.nonzero((columns >= 0) & (columns < full[:, None]))
        forced = np.concatenate([table[rows, columns[rows, which]], tail_page])
        absent = self._table.touch_all_layers(forced, self._step)
        warm = [
            table[row, self._policy.residency.warm_columns(int(full[row]), self._budget_pages)]
            for row in np.flatnonzero(fresh)
        ]
        if not absent and not warm:
            return
        empty = tail_page[tail_len == 1]  # its first token comes with this step
        mapped = self._recall.map_empty(*self._with_slots(empty, self._step), self._step)
        if mapped == absent and not warm:
            return  # as in most steps: they are all that was absent
        # Forced pages may push out anything else, warm ones only what was not just in use.
        self._load(forced, self._step)
        if warm:
            self._load(np.concatenate([forced, *warm]), self._step - 1)
        if not self._table.are_resident(forced):
            self._load_forced_late(forced)

    def _with_slots(
        self, pages: npt.NDArray[np.integer], before_step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Layers and ids of those of ``pages`` that are missing, after room was made for them."""
        every = np.arange(self._shape.num_layers)
        pages = np.broadcast_to(pages, (len(every), len(pages)))
        absent = self._table.missing(every[:, None], pages)
        layers, absent = np.divmod(absent, self._table.num_pages)
        self._table.evict(every, np.bincount(layers, minlength=len(every)), before_step)
        return layers, absent

    def _load(self, pages: npt.NDArray[np.integer], before_step: int) -> None:
        absent = self._with_slots(pages, before_step)
        self._counters.warmed_pages += self._recall.load_now(*absent, self._step)

    def _load_forced_late(self, forced: npt.NDArray[np.int64]) -> None:
        """Forced pages that found no slot, or are themselves on their way: copies hold what they need."""
        self._recall.commit(self._step)
        self._load(forced, self._step)
        if not self._table.are_resident(forced):
            raise RuntimeError("no slot for a page that must be resident; the slot count is wrong")

    def _make_room(self, fresh: npt.NDArray[np.bool_], last_missed: npt.NDArray[np.int64]) -> None:
        """Free slots for what this step will copy ahead, from pages not of use lately.

        Only then: the layer's slots are still to be read in this step, so that none can be taken
        when the pages are known.
        """
        first = int(fresh.sum()) * self._budget_pages
        every = np.arange(self._shape.num_layers)
        self._table.evict(every, last_missed.sum(axis=1) + first, self._step - 1)

    def _fill_free_slots(
        self,
        table: npt.NDArray[np.int32],
        full: npt.NDArray[np.int64],
    ) -> None:
        """If all pages of all requests fit, bring in those that nobody has missed yet.

        Then nothing will be missing, and attention is exact. What does not fit whole is left to
        selection: most of its pages would be copied for nothing.
        """
        left = self._policy.residency.fill_pages()
        if left <= 0 or full.sum() + len(table) > self._table.num_slots:
            return
        is_full = np.arange(table.shape[1]) < full[:, None]
        absent = (np.take(self._table.slot_of, table, axis=1) < 0) & is_full
        if absent.any():
            # Pages that requests share are one, and those on their way none; nor may a layer without
            # free slots use up what others could copy.
            every = np.arange(len(absent))[:, None, None]
            keys = self._table.missing(every, np.where(absent, table, -1))
            layers, pages = np.divmod(keys, self._table.num_pages)
            free = np.array([self._table.num_free(layer) for layer in range(len(absent))])
            fits = np.flatnonzero(rank_within(layers) < free[layers])[:left]
            self._recall.fill(layers[fits], pages[fits])
