"""Parameters of splitting a batch's sequences among threads."""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """Parameters of the rule that splits the pages of a batch; the rule is in ``sgl-kernel/src/split.h``.

    Attributes:
        threads: that serve the batch; with several NUMA nodes those of one of them.
        most: runs of a sequence, each for one thread.
        least_pages: of a run of the longest sequence; with several nodes of all runs together.
    """

    threads: int = 1
    most: int = 1
    least_pages: int = 1
