"""The engine's counters, incremented where the event happens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class StepTimes(NamedTuple):
    """Of one step, in seconds: from its boundary to its tokens; of its boundary; of waits for the CPU, all layers."""

    step_seconds: float
    boundary_seconds: float
    gpu_wait_seconds: float


MOST_TIMES = 4096
"""Most step times kept until they are read."""


@dataclass
class Counters:
    """Totals since start. The CPU compute ratio follows the paper's Figure 6: pages computed on the
    CPU over the budget, mean over requests, layers and steps."""

    num_layers: int
    steps: int = 0
    dense_steps: int = 0
    selected_pages: int = 0
    cpu_pages: int = 0
    fetched_pages: int = 0
    budget_pages: int = 0
    recalled_pages: int = 0
    recall_bytes: int = 0
    warmed_pages: int = 0
    recall_wait_us: int = 0
    gpu_wait_us: int = 0
    raised_thresholds: int = 0
    verify_checks: int = 0
    verify_max_rel_error: float = 0.0
    verify_unequal_selections: int = 0
    cpu_pages_by_layer: npt.NDArray[np.int64] = field(init=False)
    budget_pages_by_layer: npt.NDArray[np.int64] = field(init=False)
    gpu_wait_us_by_layer: npt.NDArray[np.int64] = field(init=False)
    times: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))

    def __post_init__(self) -> None:
        self.cpu_pages_by_layer = np.zeros(self.num_layers, np.int64)
        self.budget_pages_by_layer = np.zeros(self.num_layers, np.int64)
        self.gpu_wait_us_by_layer = np.zeros(self.num_layers, np.int64)

    @property
    def cpu_compute_ratio(self) -> float:
        return self.cpu_pages / self.budget_pages if self.budget_pages else 0.0

    def count_step(
        self, selected: int, missing: npt.NDArray[np.int64], budget: int, route: str
    ) -> None:
        """A step's selections: pages selected over all layers, ``missing`` ``[L]`` of them, ``budget`` of a layer."""
        self.selected_pages += selected
        self.budget_pages += budget * self.num_layers
        self.budget_pages_by_layer += budget
        if route == "cpu":
            self.cpu_pages += int(missing.sum())
            self.cpu_pages_by_layer += missing
        elif route == "fetch":
            self.fetched_pages += int(missing.sum())

    def count_posted(self, pages: npt.NDArray[np.int64], budget: int) -> None:
        """Pages of lists, ``[L]``, that a step posts without selection; ``budget`` of a layer are on the device."""
        self.count_step(0, pages, budget, "cpu")

    def count_waits(self, waits_us: npt.NDArray[np.int64]) -> None:
        """The device waited for the CPU's results: ``[L]``."""
        self.gpu_wait_us += int(waits_us.sum())
        self.gpu_wait_us_by_layer += waits_us
