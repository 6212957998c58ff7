"""What happens to host pages: handed out, filled, given back; and with them to their digests."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from sglang_scout.core.ranking import distinct
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import KNOWN_AFTER


class PageLifecycle:
    """Follows pages from one owner to the next; the allocator's listener.

    Args:
        host, digests, table: the stores, and what is where in the resident cache.
        resident: the resident cache, where K of a page that has filled is nearer than in its host page.

    Attributes:
        step: the step whose boundary began last.
        freed_at: ``[P]`` the last step that had begun when each page was last freed, -1: never.
    """

    def __init__(
        self, host: HostPages, digests: DigestPool, table: ResidencyTable, resident: LayerPages
    ) -> None:
        self._host, self._digests, self._table = host, digests, table
        self._resident = resident
        self._filled_here = np.zeros(host.num_pages, bool)  # by decoding, so no digest was sent
        self.step = 0
        self.freed_at = np.full(host.num_pages, -1, np.int64)
        self._last_freed = -1  # the largest of them
        # By the steps that may still run.
        self._written: deque[npt.NDArray[np.int64]] = deque(maxlen=KNOWN_AFTER)
        self._filled: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # when the last step began

    def arrived(self, full_pages: npt.NDArray[np.integer]) -> None:
        """Full pages of a request that joins: take the digests that came with their KV.

        The host waits for what the device says of them. Not at the boundary, whose stream has a step to end
        first: on a device this runs on the stream that the pages were handed out on.
        """
        unknown = ~self._digests.valid[full_pages] & ~self._filled_here[full_pages]
        if unknown.any():
            self._digests.accept(distinct(full_pages[unknown]))

    def seal(self, pages: npt.NDArray[np.integer]) -> None:
        """``pages``, -1 padded, do not change any more while they are held."""
        if self._host.checksums is not None:
            self._host.checksums.seal(distinct(pages[pages >= 0]))

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages were handed to a request that is about to receive them."""
        self._digests.unset(pages)

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages went back to the allocator: nothing that is known about them holds any more."""
        self._digests.invalidate(pages)
        self._table.invalidate(pages)
        self._filled_here[pages] = False
        if self._host.checksums is not None:
            self._host.checksums.clear(pages)
        self.freed_at[pages] = self._last_freed = self.step

    def clear(self) -> None:
        """All pages were freed (cache flush)."""
        self.free_pages(np.arange(self._host.num_pages))

    def generations(self, pages: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """How often each of ``pages`` was freed."""
        return self._table.metadata.generation[pages]

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
        results of the step ``KNOWN_AFTER`` before it have come, so that only the last ``KNOWN_AFTER`` steps
        may run. Pages that had their digests before, a request's or the radix cache's, are none of them.
        """
        return any(bool(np.isin(pages, written).any()) for written in self._written)

    def begin(
        self, step: int, new_full: npt.NDArray[np.int32], tail_page: npt.NDArray[np.int32]
    ) -> None:
        """Step boundary: complete the digests of ``new_full`` ``[n]``; the step writes to ``tail_page`` ``[B]``.

        Pages are in ``new_full`` when they are full for the first time in a step of their request. What that step's
        predecessor wrote to them is there when the next boundary has its results: then they are sealed.
        """
        self.seal(*self.still_held(self.step, self._filled))
        self._filled = new_full
        self.step = step
        pending = distinct(new_full[~self._digests.valid[new_full]])
        # A page that the last step has filled is in its tail's slot still.
        slots = np.take(self._table.slot_of, pending, axis=1)
        is_here = (slots >= 0).all(axis=0)
        self._digests.build_from_slots(pending[is_here], self._resident, slots[:, is_here])
        self._digests.build(pending[~is_here], self._host)
        self._filled_here[tail_page] = True
        self._written.append(np.concatenate([tail_page, pending]))
