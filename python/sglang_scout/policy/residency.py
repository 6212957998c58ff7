"""Residency: important pages stay, recalled asynchronously at fixed or at adaptive intervals (paper section 3.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints
from sglang_scout.engine.policy import Residency, StepReport
from sglang_scout.ops.residency import PageUses

Floats = npt.NDArray[np.float64]

GRACE_STEPS = 4
"""First steps of a request, in which its misses have priority over others'."""
MAX_INTERVAL_STEPS = 64
"""Maximum steps until a layer recalls its missing pages."""

# Gains of an alpha-beta filter for a layer's ratio and its growth. The second is lower, so that a single outlier does
# not look like a trend.
_FOLLOW_RATIO, _FOLLOW_DRIFT = 0.5, 0.1
_SMOOTH = 1 / 8  # of the reported ratios, and of the worth of copies
_MIN_WORTH, _FORGET = 0.05, 1 / 64  # a layer that has not recalled for long is worth another try
# After a late step half of the in-flight pages; constant for _CALM_STEPS on-time steps; then quickly up to _NEAR of the
# amount that was too much, and slowly from there.
_CALM_STEPS, _NEAR, _FAST_GROWTH, _SLOW_GROWTH = 4, 0.75, 1 / 4, 1 / 64


class ImportantPages(Residency):
    """Pages selected most recently stay; each layer recalls what it misses at its own interval.

    The pages that a step copies depend only on its selections and its number, and the boundary waits for them: output
    is deterministic for the same requests in the same order, however slow the copies are.

    Args:
        intervals: steps between two recalls, per layer; 0 = never.
        grace_steps: first steps of a request whose misses are recalled at once, whatever the intervals. A request
            without a hint starts cold; the paper's curve without recall (Figure 6a), too, starts from the pages found
            important after prefill.

    Attributes:
        is_due: ``[L]`` bool, whether all requests' misses count, or those of requests in their grace steps only.
        granted: ``[L]`` int64, most pages that each layer may copy in this step.
    """

    def __init__(self, intervals: Sequence[int], grace_steps: int = 1) -> None:
        self.intervals, self.grace_steps = np.array(intervals, np.int64), grace_steps
        self.is_due = np.zeros(len(self.intervals), bool)
        self.granted = np.full(len(self.intervals), np.iinfo(np.int64).max)

    def plan(self, report: StepReport) -> None:
        # Layers are staggered, so that their copies do not burst on the link.
        turns = (report.step + np.arange(len(self.intervals))) % np.maximum(self.intervals, 1)
        self.is_due = (self.intervals > 0) & (turns == 0)

    def pick(self, missed: Ints, ages: Ids, uses: PageUses) -> tuple[Ids, Ids]:
        in_grace = ages < self.grace_steps
        counts = self.is_due[:, None] | in_grace
        return uses.most_frequent(np.arange(len(missed)), missed, counts, in_grace, self.granted)

    def describe(self) -> dict[str, Any]:
        return {"intervals": self.intervals.tolist()}


class RecallController(ImportantPages):
    """Keeps each layer's CPU compute ratio under a threshold within the link's bandwidth.

    The paper chooses for each layer, offline, the longest interval that keeps its ratio under β (section 3.4). Here
    that is only the initial value: the growth of each layer's ratio is tracked step by step, and the layer recalls when
    its ratio would exceed β one step later.

    A deterministic function of its inputs, which have no measured time, only how many pages are late: two runs of the
    same requests recall the same pages as long as every copy ends within its step. If the link is later than
    ``patience_us``, the pages stay with the CPU for another step and fewer are copied. Attention is correct either way,
    but may then differ in the last digits, because the CPU's part is computed from the predicted query.

    Args:
        intervals: per layer, initial steps between two recalls; 0 = no drift.
        threshold: β, the ratio that no layer should exceed.
        step_pages: pages that one step may copy, over all layers.
        eager_layers: not computed ahead. They recall all misses in every step: their β is 0.

    Attributes:
        spare_pages: the rest of the step's pages.
        ratio: ``[L]`` smoothed measured ratio of requests after their grace steps.
        limit_pages: pages that a step may copy now; ``step_pages`` unless the link was late.
        backoffs: how often the link was late.
    """

    patience_us = 1000.0

    def __init__(
        self,
        *,
        intervals: Sequence[int],
        threshold: float,
        step_pages: int,
        eager_layers: Sequence[int] = (),
    ) -> None:
        super().__init__(intervals, GRACE_STEPS)
        layers = len(intervals)
        self.threshold, self.step_pages = threshold, step_pages
        self.granted = np.zeros(layers, np.int64)
        self.ratio = np.zeros(layers)
        self.limit_pages, self.backoffs = float(step_pages), 0
        self._target = np.full(layers, threshold)
        self._target[list(eager_layers)] = 0.0
        self._drift = np.where(self.intervals > 0, threshold / np.maximum(self.intervals, 1), 0.0)
        # Expected ratios of the steps whose misses are not known yet, the upcoming one last.
        self._expected = deque(np.zeros((RESULT_DELAY_STEPS, layers)), maxlen=RESULT_DELAY_STEPS)
        self._worth = np.ones(layers)  # share of the copied pages that the next step selected
        self._since = np.zeros(layers, np.int64)  # steps since the last recall
        self._first = np.zeros(layers, np.int64)  # of `granted`: for requests in their grace steps
        self._ceiling, self._calm_steps = float(step_pages), 0

    def plan(self, report: StepReport) -> None:
        """Step boundary: set ``granted``, ``is_due`` and ``spare_pages`` for the upcoming step."""
        self._follow_link(report)
        # Grace steps carry no information on a layer's drift.
        settled = report.ages >= self.grace_steps
        missed = report.missed[:, settled].sum(axis=1)
        capacity = report.budget_pages * int(settled.sum())
        self._follow_ratio(report, missed, capacity)
        of_grace = report.absent[:, ~settled].sum(axis=1)

        self._since += 1
        absent = report.absent[:, settled].sum(axis=1)
        growing = self._expected[-1] + self._drift > self._target
        self.is_due = (absent > 0) & (growing | (self._since >= MAX_INTERVAL_STEPS))

        pages = max(0, int(self.limit_pages) - report.late_pages)
        self._first = share(pages, of_grace, np.ones_like(self._worth))
        wanted = np.where(self.is_due, absent, 0)
        granted = share(pages - int(self._first.sum()), wanted, self._worth)
        recalls = granted > 0
        self.intervals[recalls] = self._since[recalls]
        self._since[recalls] = 0
        self.granted = self._first + granted
        self.spare_pages = pages - int(self.granted.sum())

    def _follow_ratio(self, report: StepReport, missed: Ids, capacity: int) -> None:
        """Update the filter with the last known step, and predict the upcoming one."""
        tried = report.landed > 0
        use = report.used / np.maximum(report.landed, 1)
        self._worth += np.where(tried, _SMOOTH * (use - self._worth), _FORGET * (1 - self._worth))
        np.maximum(self._worth, _MIN_WORTH, out=self._worth)
        if capacity == 0:
            return
        measured = missed / capacity
        self.ratio += _SMOOTH * (measured - self.ratio)
        surprise = measured - self._expected[0]
        for expected in self._expected:
            expected += _FOLLOW_RATIO * surprise
        self._drift = np.clip(self._drift + _FOLLOW_DRIFT * surprise, 0.0, 1.0)
        # Pages recalled in the last step are no longer missing in the upcoming one; those of grace rows came first.
        recalled = np.clip(report.started - self._first, 0, missed) / capacity
        level = self._expected[-1] + self._drift - self._worth * recalled
        self._expected.append(np.maximum(level, 0.0))

    def _follow_link(self, report: StepReport) -> None:
        """Copy less after a late step, and gradually more again once the link keeps up."""
        started = int(report.started.sum())
        if not report.late_pages:
            self._calm_steps += 1
            if self._calm_steps > _CALM_STEPS and self.limit_pages < self.step_pages:
                # Well above the amount that was too much: the link has changed.
                is_near = _NEAR <= self.limit_pages / self._ceiling <= 1 / _NEAR
                slow, fast = self._ceiling * _SLOW_GROWTH, self.limit_pages * _FAST_GROWTH
                growth = max(slow if is_near else fast, 0.25)
                self.limit_pages = min(self.limit_pages + growth, self.step_pages)
            return
        self._calm_steps = 0
        if started:  # once per overload, however many steps it takes to drain
            self.backoffs += 1
            self._ceiling = float(max(report.late_pages, started))
            self.limit_pages = max(min(self.limit_pages, self._ceiling) / 2, 1.0)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "threshold": self.threshold,
            "ratios": [round(float(r), 4) for r in self.ratio],
            "worth": [round(float(w), 2) for w in self._worth],
            "step_pages": int(self.limit_pages),
            "backoffs": self.backoffs,
        }


def share(pages: int, wanted: Ids, worth: Floats) -> Ids:
    """Divide ``pages`` among layers by greatest benefit: level the largest worth x excess, so that none starves.

    Args:
        wanted: ``[L]`` pages that each layer would take; ``worth``: ``[L]`` what one is worth, > 0.
    Returns:
        ``[L]`` int64, at most ``wanted``, with a sum of at most ``pages``.
    """
    if int(wanted.sum()) <= pages:
        return wanted.copy()
    # If only the n layers with the largest excess are above the level, it is their excess over `pages`, divided by its
    # cost per unit. Layers below it would only lower it.
    order = np.argsort(-wanted * worth, kind="stable")
    alone = (wanted[order].cumsum() - pages) / (1 / worth[order]).cumsum()
    level = np.clip(wanted - alone.max() / worth, 0, wanted)
    given = np.floor(level).astype(np.int64)
    # The remainder of rounding down goes to the largest fractions; ties in layer order.
    order = np.argsort(-(level - given) * worth, kind="stable")
    given[order[: pages - int(given.sum())]] += 1
    return np.minimum(given, wanted)
