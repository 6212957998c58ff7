"""How many threads share a sequence of a batch."""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """Rule for the number of runs that each sequence's pages are split into, one thread a run.

    A run has as many pages as each thread would get if all got the same, but at least ``least_pages``. The
    longest sequence decides for all: the others get as many runs, shorter or empty ones. So a batch of as
    many sequences as there are threads is not split, a single sequence is, and so is a batch in which one
    is much longer than the others. C++ (``sgl-kernel/src/split.h``) and the kernel that posts from a device
    do the same.

    Attributes:
        threads: that serve the batch; with several memory nodes those of one of them.
        most: runs.
        least_pages: of a run of the longest sequence; with several nodes of the runs of all together.
    """

    threads: int = 1
    most: int = 1
    least_pages: int = 1

    def runs(self, total_pages: int, largest_pages: int) -> int:
        """For a batch with so many pages altogether, and in its longest sequence."""
        share_pages = max(-(-total_pages // self.threads), self.least_pages)
        return min(max(largest_pages // share_pages, 1), self.most)
