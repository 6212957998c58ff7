"""How many threads share a sequence of a batch."""

from __future__ import annotations

from typing import NamedTuple

MOST_RUNS = 16
"""Of a sequence; kMaxParts in ring.h."""
RUNS_PER_THREAD = 16
"""Of a record, at most, where sequences are split: more of them would make no difference but in memory."""


class Split(NamedTuple):
    """Rule for the number of runs that each sequence's pages are split into, one thread a run.

    Threads take runs one after the other, so N sequences in R runs each take ``ceil(N R / threads)`` rounds.
    With P pages altogether and L in the longest sequence a round takes ``P / (N R)`` pages and the last one
    up to ``L / R``, and each run costs as much again as a sixteenth of ``least_pages``. The R of the shortest
    time is taken. So a batch of as many sequences as there are threads is not split, a single one is, and so
    are three on two threads, and a batch in which one is much longer than the others. All sequences get as
    many runs, shorter or empty ones. C++ (``sgl-kernel/src/split.h``) and the kernel that posts from a device
    do the same.

    Attributes:
        threads: that serve the batch; with several memory nodes those of one of them.
        most: runs.
        least_pages: of a run of the longest sequence; with several nodes of the runs of all together.
    """

    threads: int = 1
    most: int = 1
    least_pages: int = 1

    def runs(self, sequences: int, total_pages: int, largest_pages: int) -> int:
        """For so many sequences that have pages, so many altogether and in the longest sequence."""
        if sequences < 1:
            return 1
        most = min(
            self.most,
            largest_pages // self.least_pages,
            RUNS_PER_THREAD * self.threads // sequences,
        )

        def time(runs: int) -> int:
            every = sequences * runs
            rounds = -(-every // self.threads)
            before_last = (rounds - 1) * 16 * total_pages // every
            return before_last + 16 * largest_pages // runs + rounds * self.least_pages

        return min(range(1, max(most, 1) + 1), key=time)
