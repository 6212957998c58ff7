"""Residency: important pages stay, recalled asynchronously (paper section 3.4).

Recall is either at fixed per-layer intervals, as in the paper, or by measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.core.ranking import distinct
from sglang_scout.ops.page_uses import PageUses
from sglang_scout.policy.base import Residency, StepReport
from sglang_scout.policy.recall_controller import RecallController

Ids = npt.NDArray[np.int64]


@dataclass
class ImportantPages(Residency):
    """Pages selected most recently stay; each layer recalls what it misses at its own interval.

    The pages that a step copies depend only on its selections and its number, and the boundary waits for them: output
    is deterministic for the same requests in the same order, however slow the copies are.

    Args:
        intervals: steps between two recalls, per layer; 0 = never.
        enabled: False disables recall (the paper's ablation without periodic recall).
        warm_up_steps: first steps of a request whose misses are recalled at once. A request without a hint starts cold;
            without this it would compute its whole budget on the CPU until its layers' next recalls. Also applies with
            recall off: the paper's curve without recall (Figure 6a) starts from the pages found important after
            prefill, too.
    """

    intervals: tuple[int, ...]
    enabled: bool = True
    warm_up_steps: int = 1
    patience_us: float | None = None
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
        counts = due[:, None] | (ages < self.warm_up_steps)
        at = np.flatnonzero((missed >= 0) & counts[:, :, None])
        row = at // max(missed[0].size, 1)
        num_pages = uses.frequency.shape[1]
        keys = distinct(row * num_pages + missed.reshape(-1)[at])
        return layers[keys // num_pages], keys % num_pages

    def fill_pages(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {"intervals": list(self.intervals) if self.enabled else []}


@dataclass
class MeasuredRecall(Residency):
    """Pages selected most recently stay; a controller decides by measurements which layers recall.

    Its decisions depend on selections, on counts and on a configured number of pages per step, so they are
    deterministic too, with one exception: a boundary waits at most ``patience_us`` for a copy. If the link is later
    than that, the pages stay with the CPU for another step and the controller copies less. Attention is correct either
    way, but may then differ in the last digits between runs, because the CPU's part is computed from the predicted
    query.

    Args:
        controller: decides how many pages each layer may take.
        patience_us: of the step boundary.
    """

    controller: RecallController
    patience_us: float | None = 1000.0

    def plan(self, report: StepReport) -> None:
        self.controller.plan(report)

    def pick(
        self, layers: Ids, missed: npt.NDArray[np.int32], ages: Ids, uses: PageUses
    ) -> tuple[Ids, Ids]:
        warming = ages < self.controller.warm_up_steps
        counts = self.controller.is_due[layers][:, None] | warming
        limits = self.controller.granted[layers]
        return uses.most_frequent(layers, missed, counts, warming, limits)

    def fill_pages(self) -> int:
        return self.controller.spare_pages

    def describe(self) -> dict[str, Any]:
        return self.controller.describe()
