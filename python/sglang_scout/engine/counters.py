"""What the engine counts, incremented where the thing happens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass
class Counters:
    """Totals since start. The CPU compute ratio follows the paper's Figure 6: pages computed on the
    CPU over the budget, mean over requests, layers and steps."""

    num_layers: int
    steps: int = 0
    selected_pages: int = 0
    cpu_pages: int = 0
    budget_pages: int = 0
    recalled_pages: int = 0
    recall_bytes: int = 0
    warmed_pages: int = 0
    recall_wait_us: int = 0
    gpu_wait_us: int = 0
    verify_checks: int = 0
    verify_max_rel_error: float = 0.0
    verify_unequal_selections: int = 0
    cpu_pages_by_layer: npt.NDArray[np.int64] = field(init=False)
    budget_pages_by_layer: npt.NDArray[np.int64] = field(init=False)
    gpu_wait_us_by_layer: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.cpu_pages_by_layer = np.zeros(self.num_layers, np.int64)
        self.budget_pages_by_layer = np.zeros(self.num_layers, np.int64)
        self.gpu_wait_us_by_layer = np.zeros(self.num_layers, np.int64)

    @property
    def cpu_compute_ratio(self) -> float:
        return self.cpu_pages / self.budget_pages if self.budget_pages else 0.0

    def count_selection(self, layer: int, selected: int, missing: int, budget: int) -> None:
        self.selected_pages += selected
        self.cpu_pages += missing
        self.budget_pages += budget
        self.cpu_pages_by_layer[layer] += missing
        self.budget_pages_by_layer[layer] += budget

    def count_selections(self, selected: int, missing: npt.NDArray[np.int64], budget: int) -> None:
        """As :meth:`count_selection`, of all layers: ``missing`` ``[L]``, ``budget`` of each."""
        self.selected_pages += selected
        self.cpu_pages += int(missing.sum())
        self.budget_pages += budget * self.num_layers
        self.cpu_pages_by_layer += missing
        self.budget_pages_by_layer += budget

    def count_wait(self, layer: int, wait_us: int) -> None:
        """The device waited for pages of ``layer``: for the worker's answer, or for copies."""
        self.gpu_wait_us += wait_us
        self.gpu_wait_us_by_layer[layer] += wait_us

    def count_waits(self, waits_us: npt.NDArray[np.int64]) -> None:
        """As :meth:`count_wait`, of all layers: ``[L]``."""
        self.gpu_wait_us += int(waits_us.sum())
        self.gpu_wait_us_by_layer += waits_us
