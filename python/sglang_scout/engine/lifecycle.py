"""The life cycle of host pages and their digests: allocated, filled, freed."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from sglang_scout.core.grouping import distinct
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import RESULT_DELAY_STEPS

PageIds = npt.NDArray[np.integer]


class PageLifecycle:
    """Tracks pages across owners; the allocator's listener.

    Args:
        resident: where K of a page just filled is closer than in its host page.

    Attributes:
        step: the step of the latest boundary.
        freed_at: ``[P]`` the latest step when each page was last freed, -1: never.
    """

    def __init__(
        self, host: HostPages, digests: DigestPool, table: ResidencyTable, resident: LayerPages
    ) -> None:
        self._host, self._digests, self._table = host, digests, table
        self._resident = resident
        self._filled_here = np.zeros(host.num_pages, bool)  # by decoding, so no digest arrived
        self.step = 0
        self.freed_at = np.full(host.num_pages, -1, np.int64)
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
