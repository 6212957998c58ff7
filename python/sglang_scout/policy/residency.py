"""Residency: important pages stay, recalled asynchronously at fixed per-layer intervals (paper section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.engine.policy import Ids, Residency, StepReport
from sglang_scout.ops.residency import PageUses


@dataclass
class ImportantPages(Residency):
    """Pages selected most recently stay; each layer recalls what it misses at its own interval.

    The pages that a step copies depend only on its selections and its number, and the boundary waits for them: output
    is deterministic for the same requests in the same order, however slow the copies are.

    Args:
        intervals: steps between two recalls, per layer; 0 = never.
        grace_steps: first steps of a request whose misses are recalled at once, whatever the intervals. A request
            without a hint starts cold; the paper's curve without recall (Figure 6a), too, starts from the pages found
            important after prefill.
    """

    intervals: tuple[int, ...]
    grace_steps: int = 1
    _step: int = field(default=0, init=False)

    def due(self, layers: Ids, step: int) -> npt.NDArray[np.bool_]:
        """``[n]`` whether each of ``layers`` recalls all that it misses in ``step``: staggered, so that equal intervals
        do not burst on the link."""
        intervals = np.array(self.intervals)[layers]
        return (intervals > 0) & ((step + layers) % np.maximum(intervals, 1) == 0)

    def plan(self, report: StepReport) -> None:
        self._step = report.step

    def pick(
        self, layers: Ids, missed: npt.NDArray[np.int32], ages: Ids, uses: PageUses
    ) -> tuple[Ids, Ids]:
        counts = self.due(layers, self._step)[:, None] | (ages < self.grace_steps)
        every, none_first = np.full(len(layers), missed[0].size), np.zeros(len(ages), bool)
        return uses.most_frequent(layers, missed, counts, none_first, every)

    def describe(self) -> dict[str, Any]:
        return {"intervals": list(self.intervals)}
