"""Pages made resident before a step: forced ones, new requests' first ones, and all if everything fits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout.core.grouping import rank_within
from sglang_scout.engine.recall import Recall
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import Policy

PageIds = npt.NDArray[np.integer]
Ids = npt.NDArray[np.int64]


class Placement:
    """Loads pages into the resident cache at step boundaries."""

    def __init__(
        self, policy: Policy, budget_pages: int, table: ResidencyTable, recall: Recall
    ) -> None:
        self._policy, self.budget_pages = policy, budget_pages
        self._table, self._recall = table, recall
        self.num_layers = table.num_layers
        self._step = 0

    def load_forced(
        self,
        step: int,
        table: npt.NDArray[np.int32],
        full: Ids,
        tail_page: npt.NDArray[np.int32],
        tail_len: Ids,
        joining: list[PageIds],
    ) -> None:
        """Make sink, newest and tail pages of every request resident, and the first pages of new ones.

        Args:
            table, full, tail_page, tail_len: ``[B, N]`` host page ids, ``[B]`` full pages of each row, the page being
                filled and the tokens in it.
            joining: ``[L, n]`` pages of each request that joins with this step.
        """
        self._step = step
        rule = self._policy.rule
        sinks, newest = np.arange(rule.sink_pages), np.arange(1, rule.recent_pages + 1)
        columns = np.concatenate(
            [np.broadcast_to(sinks, (len(full), len(sinks))), full[:, None] - newest], axis=1
        )
        rows, which = np.nonzero((columns >= 0) & (columns < full[:, None]))
        forced = np.concatenate([table[rows, columns[rows, which]], tail_page])
        absent = self._table.touch_all_layers(forced, step)
        if not absent and not joining:
            return
        empty = tail_page[tail_len == 1]  # its first token comes with this step
        mapped = self._recall.map_without_copy(*self._with_slots(empty, step), step)
        if mapped == absent and not joining:
            return  # the common case: no other page was absent
        # Forced pages may evict any other page, those of joining requests only pages not just in use.
        self._load(forced, step)
        if joining:
            self._load(np.concatenate(joining, axis=1), step - 1, is_forced=False)
        if (joining and self._recall.late_pages) or not self._table.are_resident(forced):
            # No slot, or copies of these are in flight: wait for the copies, which hold slots.
            self._recall.commit(step)
            self._load(forced, step)
        if not self._table.are_resident(forced):
            raise RuntimeError("no slot for a page that must be resident; the slot count is wrong")

    def first_pages(self, full_pages: PageIds) -> PageIds:
        """``[L, n]`` those of its ``full_pages`` ``[m]`` that the policy loads first for a new request."""
        total = len(full_pages)
        count = self._policy.residency.loaded_pages(total, self.budget_pages)
        return np.broadcast_to(full_pages[total - count :], (self.num_layers, count))

    def copy_beside(self, pages: PageIds, step: int) -> None:
        """Start copying ``pages`` ``[L, n]``, -1 padded, of a request that has not joined, during ``step``."""
        every, is_new = np.arange(self.num_layers), np.ones(1, bool)
        chosen = np.ascontiguousarray(pages[:, None], np.int32)
        self._table.uses.touch(every, chosen, step, is_new)  # selected by the last prompt token
        self._recall.prefetch_arrival(*self._with_slots(pages, step - 1, is_forced=False))

    def _with_slots(
        self, pages: PageIds, before_step: int, is_forced: bool = True
    ) -> tuple[Ids, Ids]:
        """Layers and ids of the missing ones of ``pages``, ``[n]`` or ``[L, n]``, after making room."""
        every = np.arange(self._table.num_layers)
        pages = np.broadcast_to(pages, (len(every), pages.shape[-1]))
        absent = self._table.missing(every[:, None], pages)
        layers, absent = np.divmod(absent, self._table.num_pages)
        counts = np.bincount(layers, minlength=len(every))
        if not is_forced:
            counts += self._table.held_back
        self._table.evict(every, counts, before_step, is_forced)
        return layers, absent

    def _load(self, pages: PageIds, before_step: int, is_forced: bool = True) -> None:
        layers, absent = self._with_slots(pages, before_step, is_forced)
        self._recall.load_now(layers, absent, self._step, is_forced)

    def fill_free_slots(self, table: npt.NDArray[np.int32], full: Ids) -> None:
        """If all pages of all requests fit, prefetch those not missed yet.

        Then nothing will be missing, and attention is exact. Otherwise selection decides: most copies would be wasted.
        """
        left = self._policy.residency.fill_pages()
        if left <= 0 or full.sum() + len(table) > self._table.num_slots:
            return
        is_full = np.arange(table.shape[1]) < full[:, None]
        absent = (np.take(self._table.slot_of, table, axis=1) < 0) & is_full
        if absent.any():
            # Shared pages count once, in-flight ones not at all; nor may a layer without free slots use up other
            # layers' copies.
            every = np.arange(len(absent))[:, None, None]
            keys = self._table.missing(every, np.where(absent, table, -1))
            layers, pages = np.divmod(keys, self._table.num_pages)
            fits = np.flatnonzero(rank_within(layers) < self._table.num_spare[layers])[:left]
            self._recall.fill(layers[fits], pages[fits])
