"""Residency: important pages stay, recalled asynchronously at fixed per-layer intervals (paper section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.ops.residency import PageUses
from sglang_scout.policy.base import Ids, Residency, StepReport


@dataclass
class ImportantPages(Residency):
    """Pages selected most recently stay; each layer recalls what it misses at its own interval.

    The pages that a step copies depend only on its selections and its number, and the boundary waits for them: output
    is deterministic for the same requests in the same order, however slow the copies are.

    Args:
        intervals: steps between two recalls, per layer; 0 = never.
        enabled: False disables recall (the paper's ablation without periodic recall).
        grace_steps: first steps of a request whose misses are recalled at once. A request without a hint starts cold;
            without this it would compute its whole budget on the CPU until its layers' next recalls. Also applies with
            recall off: the paper's curve without recall (Figure 6a) starts from the pages found important after
            prefill, too.
    """

    intervals: tuple[int, ...]
    enabled: bool = True
    grace_steps: int = 1
    _step: int = field(default=0, init=False)

    def due(self, layer: int, step: int) -> bool:
        """Whether ``layer`` recalls all that it misses in ``step``."""
        # Staggered by layer number, so that equal intervals do not make all layers copy in the same step and burst on
        # the link.
        interval = self.intervals[layer]
        return self.enabled and interval > 0 and (step + layer) % interval == 0

    def plan(self, report: StepReport) -> None:
        self._step = report.step

    def pick(
        self, layers: Ids, missed: npt.NDArray[np.int32], ages: Ids, uses: PageUses
    ) -> tuple[Ids, Ids]:
        due = np.array([self.due(layer, self._step) for layer in layers.tolist()], bool)
        counts = due[:, None] | (ages < self.grace_steps)
        every, none_first = np.full(len(layers), missed[0].size), np.zeros(len(ages), bool)
        return uses.most_frequent(layers, missed, counts, none_first, every)

    def describe(self) -> dict[str, Any]:
        return {"intervals": list(self.intervals) if self.enabled else []}
