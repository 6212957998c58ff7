"""Checksums of an arena's pages: computed when a page is full, verified before it is read again.

They are stored in the arena, because the worker verifies before it attends; see sgl-kernel/src/checksums.h.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from sglang_scout import _native
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.ring import BELL_DTYPE

MOST_THREADS = 8  # memory-bound, more gain little
Pages = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class PageChecksums:
    """The decode server's side, on an arena of a spec with ``checksums``, which must stay open.

    Attributes:
        words: uint64 ``[L, P]`` checksums, 0 for a page that may still change.
    """

    def __init__(self, arena: Arena) -> None:
        self.words: Words = arena.checksums()
        self._at = arena.address, arena.nbytes
        bell = arena.bytes_at(arena.layout.bell_offset, BELL_DTYPE.itemsize)
        self._bell = bell.view(BELL_DTYPE)
        self._threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._seen = self.failures
        self._damaged: Pages = np.zeros((0, 2), np.int64)

    @property
    def failures(self) -> int:
        """Number of (layer, page) mismatches since the arena was created."""
        return int(self._bell["damaged"][0])

    def seal(self, pages: Pages) -> None:
        """``pages`` ``[n]`` are final: compute their missing checksums, in all layers."""
        pages = self._checked(pages, self.words.shape[1])
        _native.seal_pages(*self._at, pages.ctypes.data, len(pages), self._threads)

    def check(self, layers: Pages, pages: Pages) -> None:
        """Verify ``pages`` ``[n]`` of ``layers`` ``[n]``; :meth:`damaged` reports mismatches."""
        layers, pages = map(self._checked, (layers, pages), self.words.shape)
        ids = layers.ctypes.data, pages.ctypes.data
        _native.check_pages(*self._at, *ids, len(pages), self._threads)

    def clear(self, pages: Pages) -> None:
        """``pages`` were freed and may be overwritten."""
        self.words[:, pages] = 0

    def damaged(self) -> Pages:
        """``[n, 2]`` (layer, page) with a checksum mismatch, until the page is freed."""
        if (failures := self.failures) != self._seen:
            self._seen = failures
            self._damaged = np.argwhere(self.words & _native.PAGE_DAMAGED)
        elif len(self._damaged):
            is_damaged = self.words[tuple(self._damaged.T)] & _native.PAGE_DAMAGED
            self._damaged = self._damaged[is_damaged != 0]
        return self._damaged

    def taken(self, pages: Pages) -> Words:
        """A copy of the checksums of ``pages``, for :meth:`put`; for a damaged page, the expected one."""
        return self.words[:, pages] & ~np.uint64(_native.PAGE_DAMAGED)

    def put(self, pages: Pages, words: Words) -> None:
        """Set the checksums of ``pages``, to which the K and V of :meth:`taken` have been written."""
        self.words[:, pages] = words

    def _checked(self, ids: Pages, end: int) -> Pages:
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < end:
            raise ValueError(f"ids are {ids.min()} to {ids.max()}, expected values in [0, {end})")
        return ids
