"""Residency axis: important pages stay, recalled asynchronously (paper section 3.4).

Two ways to choose when: at fixed per-layer intervals, as the paper does, or by what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.core.pages import DEFAULT_HALF_LIFE_STEPS
from sglang_scout.core.ranking import bits_of, distinct, least_of_each
from sglang_scout.policy.axes import StepReport
from sglang_scout.policy.recall_controller import RecallController

Ids = npt.NDArray[np.int64]

_NONE = np.zeros(0, np.int64)


def whole_if_it_fits(n_full: int, quota_pages: int) -> Ids:
    """Columns of a fresh request to load at once: all that it has, or none.

    What fits is loaded whole, and attention is then exact from the first token on. A longer request
    gets its pages after its first selection has said which ones matter.
    """
    return np.arange(n_full if n_full <= quota_pages else 0, dtype=np.int64)


def hottest(
    layers: Ids,
    missed: npt.NDArray[np.int32],
    counts: npt.NDArray[np.bool_],
    is_first: npt.NDArray[np.bool_],
    heat: npt.NDArray[np.float32],
    limit_pages: Ids,
) -> tuple[Ids, Ids]:
    """Of each layer the ``limit_pages[i]`` pages of ``missed[i]`` that are worth most.

    Those of first rows come before all others, then the hottest: selected lately, often, and by
    many requests, whom one copy serves together.

    Args:
        layers: ``[n]`` ascending; ``limit_pages``: ``[n]``.
        missed: ``[n, B, k]`` page ids, -1 padded.
        counts: ``[n, B]`` rows of each layer whose pages may be chosen.
        is_first: ``[B]`` rows whose pages come first.
        heat: ``[L, P]``.
    Returns:
        Layers and pages, distinct pairs; ascending if there are none too many.
    """
    n, rows, k = missed.shape
    if not limit_pages.any():
        return _NONE, _NONE
    at = np.flatnonzero((missed >= 0) & counts[:, :, None])
    row, num_pages = at // k, heat.shape[1]
    # The smallest number of a (layer, page) says whether a first row is among those that miss it.
    layer, row = np.divmod(row, max(rows, 1))
    codes = (layer * num_pages + missed.reshape(-1)[at]) * 2
    codes = distinct(codes + ~is_first[row])
    codes = codes[np.append(True, codes[1:] >> 1 != codes[:-1] >> 1)[: len(codes)]]
    group, pages = np.divmod(codes >> 1, num_pages)
    if (np.bincount(group, minlength=n) <= limit_pages).all():
        return layers[group], pages
    coldness = (1 << 31) - bits_of(heat.reshape(-1)[layers[group] * num_pages + pages])
    best = least_of_each(group, (codes & 1) << 32 | coldness, limit_pages)
    return layers[group[best]], pages[best]


@dataclass
class ImportantPages:
    """Pages selected most recently stay; each layer recalls what it misses at its own interval.

    Which pages a step copies depends on its selections and its number alone, and the boundary waits
    for them: the same requests in the same order get the same tokens, however slow the copies are.

    Args:
        intervals: steps between two recalls, per layer; 0 = never.
        enabled: False switches recall off altogether (the paper's ablation without periodic recall).
        young_steps: first steps of a request whose misses are recalled at once. A request arrives
            with an empty device cache; without this it would compute its whole budget on the CPU
            until its layers' turns come. It holds with recall off too: the paper's curve without
            recall (Figure 6a) also starts from the pages found important after prefill.
    """

    intervals: tuple[int, ...]
    enabled: bool = True
    young_steps: int = 1
    patience_us: float | None = None
    half_life_steps: float = DEFAULT_HALF_LIFE_STEPS
    _step: int = field(default=0, init=False)

    def due(self, layer: int, step: int) -> bool:
        """Whether ``layer`` recalls all that it misses in ``step``."""
        # The layer number shifts the phase, so that equal intervals do not make all layers copy
        # in the same step and burst on the link.
        interval = self.intervals[layer]
        return self.enabled and interval > 0 and (step + layer) % interval == 0

    def plan(self, report: StepReport) -> None:
        self._step = report.step

    def pick(
        self, layers: Ids, missed: npt.NDArray[np.int32], ages: Ids, heat: npt.NDArray[np.float32]
    ) -> tuple[Ids, Ids]:
        due = np.array([self.due(layer, self._step) for layer in layers.tolist()], bool)
        counts = due[:, None] | (ages < self.young_steps)
        at = np.flatnonzero((missed >= 0) & counts[:, :, None])
        row = at // max(missed[0].size, 1)
        keys = distinct(row * heat.shape[1] + missed.reshape(-1)[at])
        return layers[keys // heat.shape[1]], keys % heat.shape[1]

    def fill_pages(self) -> int:
        return 0

    def warm_columns(self, n_full: int, quota_pages: int) -> Ids:
        return whole_if_it_fits(n_full, quota_pages)

    def describe(self) -> dict[str, Any]:
        return {"intervals": list(self.intervals) if self.enabled else []}


@dataclass
class MeasuredRecall:
    """Pages selected most recently stay; a controller decides by what was measured who recalls.

    Its decisions depend on selections, on counts and on a configured number of pages per step, so
    they too repeat exactly, with one exception: a boundary does not wait longer than
    ``patience_us`` for a copy. If the link is later than that, the pages stay with the CPU for
    another step and the controller copies less. A request's tokens are correct either way, but they
    may then differ in their last digits from run to run, because the CPU's part is computed from
    the predicted query.

    Args:
        controller: decides how many pages each layer may take.
        patience_us: of the step boundary.
    """

    controller: RecallController
    patience_us: float | None = 1000.0
    half_life_steps: float = DEFAULT_HALF_LIFE_STEPS

    def plan(self, report: StepReport) -> None:
        self.controller.plan(report)

    def pick(
        self, layers: Ids, missed: npt.NDArray[np.int32], ages: Ids, heat: npt.NDArray[np.float32]
    ) -> tuple[Ids, Ids]:
        young = ages < self.controller.young_steps
        counts = self.controller.is_due[layers][:, None] | young
        limits = self.controller.granted[layers]
        return hottest(layers, missed, counts, young, heat, limits)

    def fill_pages(self) -> int:
        return self.controller.spare_pages

    def warm_columns(self, n_full: int, quota_pages: int) -> Ids:
        return whole_if_it_fits(n_full, quota_pages)

    def describe(self) -> dict[str, Any]:
        return self.controller.describe()
