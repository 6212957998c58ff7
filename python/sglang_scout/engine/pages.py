"""The pages of a decode server: who owns each, where its copies are, and which are made resident before a step.

    free --allocate_pages--> allocated --KV arrives, or decoding fills it--> full --free_pages--> free
                                                  its digest is valid, and its checksum sealed

    absent --reserve--> in flight --commit--> resident --evict--> absent        its copy on the device, for each layer

Freeing a page drops its digest, its checksum and its copies. Two clocks tell whether a page is still the one meant:

    freed_at     a step number: has it been freed since that step began? For a step's results, whose pages the host
                 learns two boundaries later.
    generation   a count: has it been freed since it was looked up? For copies in flight and waiting requests, which may
                 begin, end and see their pages reused within one step.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints, PageIds
from sglang_scout.engine.recall import Recall
from sglang_scout.engine.stores import Parts
from sglang_scout.ops.residency import distinct, rank_within


class Pages:
    """Tracks pages across owners, as the allocator's listener, and loads them at step boundaries.

    Attributes:
        step: the step of the latest boundary.
        freed_at: ``[P]`` the latest step when each page was last freed, -1: never.
    """

    def __init__(self, parts: Parts, recall: Recall) -> None:
        self._policy, self._sizes, self._recall = parts.policy, parts.sizes, recall
        self._host, self._digests, self._table = parts.host, parts.digests, parts.table
        self._resident, self._every = parts.resident.as_layers(), np.arange(parts.table.num_layers)
        count = parts.host.num_pages
        self._filled_here = np.zeros(count, bool)  # by decoding, so no digest arrived
        self.step = 0
        self.freed_at = np.full(count, -1, np.int64)
        self._last_freed = -1  # the maximum of them
        # By the steps that may still run.
        self._written: deque[PageIds] = deque(maxlen=RESULT_DELAY_STEPS)
        self._filled: PageIds = np.zeros(0, np.int32)  # when the last step began

    def arrived(self, full_pages: PageIds) -> None:
        """Full pages of a request that joins: accept the digests that arrived with their KV.

        Not at the boundary, whose stream has a step to finish first: the host waits here, on the allocation's stream.
        """
        unknown = ~self._digests.valid[full_pages] & ~self._filled_here[full_pages]
        if unknown.any():
            self._digests.accept(distinct(full_pages[unknown]))

    def seal(self, pages: PageIds) -> None:
        """``pages``, -1 padded, are final while they are held."""
        if self._host.checksums is not None:
            self._host.checksums.seal(distinct(pages[pages >= 0]))

    def allocate_pages(self, pages: PageIds) -> None:
        """Pages were allocated to a request that will receive its KV."""
        self._digests.unset(pages)

    def free_pages(self, pages: PageIds) -> None:
        """Pages went back to the allocator: everything known about them becomes invalid."""
        self._digests.invalidate(pages)
        self._table.invalidate(pages)
        self._filled_here[pages] = False
        if self._host.checksums is not None:
            self._host.checksums.clear(pages)
        self.freed_at[pages] = self._last_freed = self.step

    def clear(self) -> None:
        """All pages were freed (cache flush)."""
        self.free_pages(np.arange(self._host.num_pages))

    def generations(self, pages: PageIds) -> PageIds:
        """How often each of ``pages`` was freed."""
        return self._table.metadata.generation[pages]

    def still_held(self, step: int, *pages: PageIds) -> list[PageIds]:
        """``pages``, with -1 for those that were freed since ``step`` began."""
        if self._last_freed < step:
            return list(pages)
        is_held = np.append(self.freed_at < step, False)  # the last one is for -1
        return [np.where(is_held[some], some, -1) for some in pages]

    def may_be_written(self, pages: PageIds) -> bool:
        """Whether a step that may still be running writes to any of ``pages``, or to their digests.

        SGLang frees the pages of requests that ended after launching the next step with them. A step writes one token
        to each row's tail page, and its boundary launches the missing digests of pages: to these, whoever owns them by
        then, and to no others. A boundary ends when the results of the step ``RESULT_DELAY_STEPS`` before it have
        arrived, so only the last ``RESULT_DELAY_STEPS`` steps may be running.
        """
        return any(bool(np.isin(pages, written).any()) for written in self._written)

    def begin(self, step: int, new_full: PageIds, tail_page: PageIds) -> None:
        """Step boundary: compute missing digests of ``new_full`` ``[n]``; the step writes to ``tail_page`` ``[B]``.

        ``new_full`` are full for the first time in a step of their request. They are sealed at the next boundary, when
        the previous step's writes to them are complete.
        """
        self.seal(*self.still_held(self.step, self._filled))
        self._filled = new_full
        self.step = step
        pending = distinct(new_full[~self._digests.valid[new_full]])
        # A page that the last step has filled is still in its tail slot.
        slots = np.take(self._table.slot_of, pending, axis=1)
        is_here = (slots >= 0).all(axis=0)
        self._digests.build_from_slots(pending[is_here], self._resident, slots[:, is_here])
        self._digests.build(pending[~is_here], self._host)
        self._filled_here[tail_page] = True
        self._written.append(np.concatenate([tail_page, pending]))

    def load_forced(
        self, table: Ints, full: Ids, tail_page: Ints, tail_len: Ids, joining: list[PageIds]
    ) -> None:
        """Make sink, newest and tail pages of every request resident, and the first pages ``joining`` of new ones, each
        ``[L, n]``. ``table`` ``[B, N]`` has ``full`` ``[B]`` pages of each row, then the one being filled."""
        rule = self._policy.rule
        sinks, newest = np.arange(rule.sink_pages), np.arange(1, rule.recent_pages + 1)
        columns = np.concatenate(
            [np.broadcast_to(sinks, (len(full), len(sinks))), full[:, None] - newest], axis=1
        )
        rows, which = np.nonzero((columns >= 0) & (columns < full[:, None]))
        forced = np.concatenate([table[rows, columns[rows, which]], tail_page])
        absent = self._table.touch_all_layers(forced, self.step)
        if not absent and not joining:
            return
        empty = tail_page[tail_len == 1]  # its first token comes with this step
        taken = self._table.reserve(*self._with_slots(empty, self.step))
        if self._table.commit(taken, self.step) == absent and not joining:
            return  # the common case: no other page was absent
        # Forced pages may evict any other page, those of joining requests only pages not just in use.
        self._load(forced, self.step)
        if joining:
            self._load(np.concatenate(joining, axis=1), self.step - 1, is_forced=False)
        if (joining and self._recall.late_pages) or not self._table.are_resident(forced):
            # No slot, or copies of these are in flight: wait for the copies, which hold slots.
            self._recall.commit(self.step)
            self._load(forced, self.step)
        if not self._table.are_resident(forced):
            raise RuntimeError("no slot for a page that must be resident; the slot count is wrong")

    def first_pages(self, full_pages: PageIds) -> PageIds:
        """``[L, n]`` those of its ``full_pages`` ``[m]`` that the policy loads first for a new request."""
        total = len(full_pages)
        count = self._policy.residency.loaded_pages(total, self._sizes.budget_pages)
        return np.broadcast_to(full_pages[total - count :], (len(self._every), count))

    def copy_beside(self, pages: PageIds) -> None:
        """Start copying ``pages`` ``[L, n]``, -1 padded, of a request that has not joined, during this step."""
        # The last prompt token selected them.
        chosen, is_new = np.ascontiguousarray(pages[:, None], np.int32), np.ones(1, bool)
        self._table.uses.touch(self._every, chosen, self.step, is_new)
        self._recall.prefetch(*self._with_slots(pages, self.step - 1, is_forced=False), "arrival")

    def _with_slots(
        self, pages: PageIds, before_step: int, is_forced: bool = True
    ) -> tuple[Ids, Ids]:
        """Layers and ids of the missing ones of ``pages``, ``[n]`` or ``[L, n]``, after making room."""
        pages = np.broadcast_to(pages, (len(self._every), pages.shape[-1]))
        keys = self._table.missing(self._every[:, None], pages)
        layers, absent = np.divmod(keys, self._table.num_pages)
        counts = np.bincount(layers, minlength=len(self._every))
        if not is_forced:
            counts += self._table.held_back
        self._table.evict(self._every, counts, before_step, is_forced)
        return layers, absent

    def _load(self, pages: PageIds, before_step: int, is_forced: bool = True) -> None:
        layers, absent = self._with_slots(pages, before_step, is_forced)
        self._recall.load_now(layers, absent, self.step, is_forced)

    def fill_free_slots(self, table: Ints, full: Ids) -> None:
        """If all pages of all requests fit, prefetch those not missed yet.

        Then nothing will be missing. Otherwise selection decides: most copies would be wasted.
        """
        left = self._policy.residency.spare_pages
        if left <= 0 or full.sum() + len(table) > self._table.num_slots:
            return
        is_full = np.arange(table.shape[1]) < full[:, None]
        absent = (np.take(self._table.slot_of, table, axis=1) < 0) & is_full
        if absent.any():
            # Shared pages count once, in-flight ones not at all; nor may a layer without free slots use up other
            # layers' copies.
            keys = self._table.missing(self._every[:, None, None], np.where(absent, table, -1))
            layers, pages = np.divmod(keys, self._table.num_pages)
            fits = np.flatnonzero(rank_within(layers) < self._table.num_spare[layers])[:left]
            self._recall.prefetch(layers[fits], pages[fits], "fill")
