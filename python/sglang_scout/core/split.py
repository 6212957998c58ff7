"""How many threads share a sequence of a batch."""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """What the rule for splitting the pages of a batch depends on; the rule is in ``sgl-kernel/src/split.h``.

    Attributes:
        threads: that serve the batch; with several memory nodes those of one of them.
        most: runs of a sequence, each for one thread.
        least_pages: of a run of the longest sequence; with several nodes of the runs of all together.
    """

    threads: int = 1
    most: int = 1
    least_pages: int = 1
