"""Checksums of an arena's pages: made when all tokens of a page are there, compared before it is read again.

The words lie in the arena, because the worker compares before it attends; sgl-kernel/src/checksums.h says how.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from sglang_scout import _native
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.ring import BELL_DTYPE

MOST_THREADS = 8  # memory binds, more gain little

Pages = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class PageChecksums:
    """The decode server's side.

    Args:
        arena: of a spec with ``checksums``; must stay open.

    Attributes:
        words: uint64 ``[L, P]``, 0 for a page that may still change.
    """

    def __init__(self, arena: Arena) -> None:
        self.words: Words = arena.checksums()
        self._at = arena.address, arena.nbytes
        bell = arena.bytes_at(arena.layout().bell_offset, BELL_DTYPE.itemsize)
        self._bell = bell.view(BELL_DTYPE)
        self._threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._seen = self.failures
        self._damaged: Pages = np.zeros((0, 2), np.int64)

    @property
    def failures(self) -> int:
        """Pages of a layer that were found to differ, since the arena was made."""
        return int(self._bell["damaged"][0])

    def seal(self, pages: Pages) -> None:
        """``pages`` ``[n]`` do not change any more: make the checksums that are not there, in all layers."""
        pages = self._checked(pages, self.words.shape[1])
        _native.seal_pages(*self._at, pages.ctypes.data, len(pages), self._threads)

    def check(self, layers: Pages, pages: Pages) -> None:
        """Compare ``pages`` ``[n]`` of ``layers`` ``[n]``; :meth:`damaged` says what was found."""
        layers, pages = map(self._checked, (layers, pages), self.words.shape)
        ids = layers.ctypes.data, pages.ctypes.data
        _native.check_pages(*self._at, *ids, len(pages), self._threads)

    def clear(self, pages: Pages) -> None:
        """``pages`` were freed: others write to them now."""
        self.words[:, pages] = 0

    def damaged(self) -> Pages:
        """``[n, 2]`` layer and page of those that were found to differ, until they are freed."""
        if (failures := self.failures) != self._seen:
            self._seen = failures
            self._damaged = np.argwhere(self.words & _native.PAGE_DAMAGED)
        elif len(self._damaged):
            is_damaged = self.words[tuple(self._damaged.T)] & _native.PAGE_DAMAGED
            self._damaged = self._damaged[is_damaged != 0]
        return self._damaged

    def taken(self, pages: Pages) -> Words:
        """A copy of the words of ``pages``, for :meth:`put`: of a page that was damaged, what it should be."""
        return self.words[:, pages] & ~np.uint64(_native.PAGE_DAMAGED)

    def put(self, pages: Pages, words: Words) -> None:
        """K and V that the words of :meth:`taken` belong to were written to ``pages``."""
        self.words[:, pages] = words

    def _checked(self, ids: Pages, end: int) -> Pages:
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < end:
            raise ValueError(f"ids are {ids.min()} to {ids.max()}, expected values in [0, {end})")
        return ids
