"""The engine's counters, incremented where the event happens."""

from __future__ import annotations

from collections import deque
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class StepTimes(NamedTuple):
    """Of one step, in seconds: from its boundary to its tokens; of its boundary; of waits for the CPU, all layers."""

    step_seconds: float
    boundary_seconds: float
    gpu_wait_seconds: float


MAX_TIMES = 4096
"""Most step times kept until they are read."""


class Stat(NamedTuple):
    """What ``/metrics`` and the documents say of a number. ``kind``: counter, gauge or histogram."""

    kind: str
    unit: str
    help: str


def _counter(unit: str, help: str) -> Any:
    return field(default=0, metadata={"stat": Stat("counter", unit, help)})


@dataclass
class Counters:
    """Totals since start; those without help are in ``/server_info`` only. The CPU compute ratio follows the paper's
    Figure 6: pages computed on the CPU over the budget, mean over requests, layers and steps."""

    num_layers: InitVar[int]
    steps: int = _counter("steps", "Decode steps")
    dense_steps: int = _counter(
        "steps", "Steps with full attention: all pages resident, few beyond the budget"
    )
    selected_pages: int = _counter("pages", "Selected, summed over requests, layers and steps")
    cpu_pages: int = _counter("pages", "Computed by CPU attention because they were not resident")
    fetched_pages: int = _counter(
        "pages", "Copied to the device before the layer that selected them"
    )
    budget_pages: int = 0
    recalled_pages: int = _counter("pages", "Copied to the device by recalls")
    recall_bytes: int = _counter("bytes", "Copied to the device by recalls")
    warmed_pages: int = 0
    recall_wait_us: int = 0
    gpu_wait_us: int = 0
    raised_thresholds: int = _counter(
        "heads", "Heads without room for all tokens that they would keep"
    )
    verify_checks: int = 0
    verify_max_rel_error: float = 0.0
    verify_unequal_selections: int = 0
    cpu_pages_by_layer: Ids = field(init=False)
    budget_pages_by_layer: Ids = field(init=False)
    gpu_wait_us_by_layer: Ids = field(init=False)
    times: deque[StepTimes] = field(init=False)

    def __post_init__(self, num_layers: int) -> None:
        by_layer = np.zeros((3, num_layers), np.int64)
        self.cpu_pages_by_layer, self.budget_pages_by_layer, self.gpu_wait_us_by_layer = by_layer
        self.times = deque(maxlen=MAX_TIMES)

    def totals(self) -> dict[str, float]:
        return {x.name: getattr(self, x.name) for x in fields(self) if x.init}

    @property
    def cpu_compute_ratio(self) -> float:
        return self.cpu_pages / self.budget_pages if self.budget_pages else 0.0

    def count_step(self, selected: int, missing: Ids, budget: int, route: str) -> None:
        """A step's selections: pages selected over all layers, ``missing`` ``[L]`` of them, ``budget`` of a layer."""
        self.selected_pages += selected
        self.budget_pages += budget * len(missing)
        self.budget_pages_by_layer += budget
        if route == "cpu":
            self.cpu_pages += int(missing.sum())
            self.cpu_pages_by_layer += missing
        elif route == "fetch":
            self.fetched_pages += int(missing.sum())

    def count_waits(self, waits_us: Ids) -> None:
        """The device waited for the CPU's results: ``[L]``."""
        self.gpu_wait_us += int(waits_us.sum())
        self.gpu_wait_us_by_layer += waits_us
