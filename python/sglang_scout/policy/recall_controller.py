"""Adaptive recall: hold each layer's CPU compute ratio under a threshold with the copies a link allows.

The paper chooses for each layer, offline, the longest interval that keeps its ratio under β (section
3.4). The profile, or ``recall_interval``, is a starting point here: how fast a layer's ratio grows is
followed step by step, and the layer recalls when its ratio would be above β one step later. A layer
whose important pages stand still does not copy; one that moves fast copies as often as it must.

What the controller decides follows from its inputs alone. It reads no clock: times are inputs, and
they count only while the link is late. How many pages a step may copy is a configured constant, so
that two runs of the same requests recall the same pages as long as every copy ends within its step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.policy.base import KNOWN_AFTER, StepReport

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WARM_UP_STEPS = 4
LINK_SHARE = 0.5
"""Share of a step's time that copies may take once the link has been late."""
MAX_INTERVAL_STEPS = 64
"""A layer that misses anything recalls it at the latest after so many steps."""

# How much of a surprise goes into the estimate of a layer's ratio and of its growth. The second is
# slower, so that a single odd step does not look like a trend (an alpha-beta filter).
_FOLLOW_RATIO, _FOLLOW_DRIFT = 0.5, 0.1
_SMOOTH = 1 / 8  # of the ratios that are shown, and of what copies have turned out to be worth
_LEAST_WORTH = 0.05
_FORGET = 1 / 64

# The link. After a late step half of what was under way; no more for _CALM_STEPS steps in time; then
# quickly up to _NEAR of what was too much, and from there on slowly.
_CALM_STEPS = 4
_NEAR = 0.75
_FAST_GROWTH, _SLOW_GROWTH = 1 / 4, 1 / 64


class RecallController:
    """Says at each step boundary which layers recall and how many pages they may take.

    Args:
        intervals: per layer, steps between two recalls to start from; 0 = as if nothing drifted.
        threshold: β, the ratio that no layer should exceed.
        step_pages: pages that one step may copy, over all layers.
        eager_layers: layers without a lead, where every page on the CPU is waited for. They recall
            whatever they miss in every step: their β is 0.
        warm_up_steps: first steps of a request, in which its misses come before those of others.

    Attributes:
        granted: ``[L]`` int64, pages that each layer may copy in this step.
        is_due: ``[L]`` bool, whether all requests' misses count, or those of requests in warm-up only.
        spare_pages: what is left of the step's pages.
        ratio: ``[L]`` smoothed measured ratio of requests after their warm-up steps.
        limit_pages: pages that a step may copy now; ``step_pages`` unless the link was late.
        backoffs: how often the link was late.
    """

    def __init__(
        self,
        *,
        intervals: Sequence[int],
        threshold: float,
        step_pages: int,
        eager_layers: Sequence[int] = (),
        warm_up_steps: int = WARM_UP_STEPS,
    ) -> None:
        layers = len(intervals)
        self.threshold = threshold
        self.warm_up_steps = warm_up_steps
        self.step_pages = step_pages
        self.granted = np.zeros(layers, np.int64)
        self.is_due = np.zeros(layers, bool)
        self.spare_pages = 0
        self.ratio = np.zeros(layers)
        self.limit_pages = float(step_pages)
        self.backoffs = 0
        self._target = np.full(layers, threshold)
        self._target[list(eager_layers)] = 0.0
        self._interval = np.array(intervals, np.int64)
        starts = np.maximum(self._interval, 1)
        self._drift = np.where(self._interval > 0, threshold / starts, 0.0)
        # Ratios expected of the steps whose misses are not known yet, the coming one last.
        self._expected = deque(np.zeros((KNOWN_AFTER, layers)), maxlen=KNOWN_AFTER)
        self._worth = np.ones(layers)  # share of the copied pages that the next step selected
        self._since = np.zeros(layers, np.int64)  # steps since the last recall
        self._ceiling = float(step_pages)
        self._calm_steps = 0

    def plan(self, report: StepReport) -> None:
        """Step boundary: set ``granted``, ``is_due`` and ``spare_pages`` for the coming step."""
        self._follow_link(report)
        # Warm-up steps say nothing about how a layer's pages drift.
        settled = report.ages >= self.warm_up_steps
        missed = report.missed[:, settled].sum(axis=1)
        capacity = report.budget_pages * int(settled.sum())
        self._follow_ratio(report, missed, capacity)
        warming = report.absent[:, ~settled].sum(axis=1)

        self._since += 1
        absent = report.absent[:, settled].sum(axis=1)
        growing = self._expected[-1] + self._drift > self._target
        self.is_due = (absent > 0) & (growing | (self._since >= MAX_INTERVAL_STEPS))
        self._interval[self.is_due] = self._since[self.is_due]
        self._since[self.is_due] = 0

        pages = max(0, int(self.limit_pages) - report.late_pages)
        first = share(pages, warming, np.ones_like(self._worth))
        wanted = np.where(self.is_due, absent, 0)
        rest = share(pages - int(first.sum()), wanted, self._worth)
        self.granted = first + rest
        self.spare_pages = pages - int(self.granted.sum())

    def _follow_ratio(self, report: StepReport, missed: Counts, capacity: int) -> None:
        """Compare the last known step with what was expected of it, and expect the coming one."""
        tried = report.landed > 0
        use = report.used / np.maximum(report.landed, 1)
        # A layer that has not been tried for long is worth another try.
        self._worth += np.where(tried, _SMOOTH * (use - self._worth), _FORGET * (1 - self._worth))
        np.maximum(self._worth, _LEAST_WORTH, out=self._worth)
        if capacity == 0:
            return
        measured = missed / capacity
        self.ratio += _SMOOTH * (measured - self.ratio)
        surprise = measured - self._expected[0]
        for expected in self._expected:
            expected += _FOLLOW_RATIO * surprise
        self._drift = np.clip(self._drift + _FOLLOW_DRIFT * surprise, 0.0, 1.0)
        # What was recalled in the last step is no longer missing in the coming one.
        recalled = np.where(self.is_due, np.minimum(report.started, missed), 0) / capacity
        level = self._expected[-1] + self._drift - self._worth * recalled
        self._expected.append(np.maximum(level, 0.0))

    def _follow_link(self, report: StepReport) -> None:
        """Copy less after a late step, and carefully more again when the link keeps up."""
        if not report.late_pages:
            self._calm_steps += 1
            if self._calm_steps > _CALM_STEPS and self.limit_pages < self.step_pages:
                # Well above what was too much once, the link has become another.
                is_near = _NEAR <= self.limit_pages / self._ceiling <= 1 / _NEAR
                growth = (
                    self._ceiling * _SLOW_GROWTH if is_near else self.limit_pages * _FAST_GROWTH
                )
                self.limit_pages = min(self.limit_pages + max(growth, 0.25), self.step_pages)
            return
        self._calm_steps = 0
        # One overload is one reason to back off, however many steps it takes to drain.
        started = int(report.started.sum())
        if not started:
            return
        self.backoffs += 1
        self._ceiling = float(max(report.late_pages, started))
        self.limit_pages = min(self.limit_pages, self._ceiling) / 2
        fits = LINK_SHARE * report.step_us * report.link_pages_per_us
        if fits > 0:
            self.limit_pages = min(self.limit_pages, fits)
        self.limit_pages = max(self.limit_pages, 1.0)

    def describe(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "ratios": [round(float(r), 4) for r in self.ratio],
            "intervals": self._interval.tolist(),
            "worth": [round(float(w), 2) for w in self._worth],
            "step_pages": int(self.limit_pages),
            "backoffs": self.backoffs,
        }


def share(pages: int, wanted: Counts, worth: Floats) -> Counts:
    """Divide ``pages`` among layers, where a page buys most: level the largest worth x excess.

    Args:
        wanted: ``[L]`` pages that each layer would take; ``worth``: ``[L]`` what one is worth, > 0.
    Returns:
        ``[L]`` int64, at most ``wanted``, with a sum of at most ``pages``. Only layers whose excess
        lies above a common level get some. To serve one layer whole before the next would let a
        layer that is always worst starve all others.
    """
    if pages <= 0:
        return np.zeros_like(wanted)
    if int(wanted.sum()) <= pages:
        return wanted.copy()
    # Were the n layers with the largest excess alone above the level, it would be their excess over
    # `pages`, divided by what a unit of it costs them. Those below it would only lower it.
    order = np.argsort(-wanted * worth, kind="stable")
    alone = (wanted[order].cumsum() - pages) / (1 / worth[order]).cumsum()
    level = np.clip(wanted - alone.max() / worth, 0, wanted)
    given = np.floor(level).astype(np.int64)
    # What rounding down has left goes to the largest fractions; equal ones in layer order.
    order = np.argsort(-(level - given) * worth, kind="stable")
    given[order[: pages - int(given.sum())]] += 1
    return np.minimum(given, wanted)
