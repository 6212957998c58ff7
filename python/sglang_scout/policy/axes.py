"""The four axes on which GPU-CPU offload methods differ, and the policy that joins them.

The engine asks these objects and never asks which policy it serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_scout.core.correction import StreamCorrection
from sglang_scout.ops.residency import PageUses


class DigestAxis(Protocol):
    """How a page is summarised and scored."""

    @property
    def form(self) -> str:
        """What a digest holds; the engine knows its forms by name (``engine/digest_forms.py``)."""

    @property
    def head_reduce(self) -> str:
        """How query heads' scores become one score per page (``ops/score.py``)."""

    @property
    def sink_pages(self) -> int:
        """Leading full pages that are selected whatever their score."""

    @property
    def recent_pages(self) -> int:
        """Newest full pages that are selected whatever their score."""

    @property
    def resident_bonus(self) -> float:
        """Added to the score of a page that is resident, so that equals stay where they are."""

    @property
    def only_selected(self) -> bool:
        """Attend to the selected pages alone, not to whatever else is resident."""


class PredictorAxis(Protocol):
    """Where the query comes from that selects pages and computes the missing ones."""

    @property
    def lead(self) -> int:
        """Layers of head start: 1 = predicted at the previous layer's input, 0 = the real query."""

    @property
    def carry(self) -> float:
        """Share of the previous token's change across a layer that is added to the layer's input."""

    @property
    def correction(self) -> StreamCorrection | None:
        """What was learned about the change of a layer's input across the layer."""

    @property
    def exact_steps(self) -> int:
        """First steps of a request in which its queries are not predicted."""

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        """Layers whose query is predicted at the input of ``layer``."""


class MissingAxis(Protocol):
    """Who computes selected pages that are not resident."""

    @property
    def copy_ahead(self) -> bool:
        """False: the CPU worker attends to them in place; True: they are copied to the device first."""


@dataclass(frozen=True)
class StepReport:
    """What was measured up to a step boundary; all that a residency decision may depend on.

    L layers, B rows of the step that has just ended. Pages are (layer, page) pairs, K and V together.

    Attributes:
        step: the step that is about to begin.
        budget_pages: k, pages selected per request and layer.
        ages: ``[B]`` int64, steps that each row had done before the last one.
        missed: ``[L, B]`` int64, selected pages that were not resident.
        fresh_rows: rows whose first step is the coming one.
        started: ``[L]`` int64, pages whose copy began in the last step.
        landed, used: ``[L]`` int64, pages that became resident one boundary ago, and those of them
            that the step in between selected.
        late_pages: pages whose copy began in an earlier step and has not ended yet.
        step_us: measured time of a step, smoothed; 0 until known.
        link_pages_per_us: measured speed of finished copies, smoothed; 0 until known.
    """

    step: int
    budget_pages: int
    ages: npt.NDArray[np.int64]
    missed: npt.NDArray[np.int64]
    fresh_rows: int
    started: npt.NDArray[np.int64]
    landed: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    late_pages: int
    step_us: float = 0.0
    link_pages_per_us: float = 0.0


class ResidencyAxis(Protocol):
    """Which pages stay on the device and when missing ones are recalled."""

    @property
    def patience_us(self) -> float | None:
        """How long a step boundary waits for copies of the step before; None: until they are done."""

    @property
    def half_life_steps(self) -> float:
        """Steps after which a page's selection counts half when slots are given away."""

    def plan(self, report: StepReport) -> None:
        """Step boundary: take in what was measured, and decide the coming step's recalls."""

    def pick(
        self,
        layers: npt.NDArray[np.int64],
        missed: npt.NDArray[np.int32],
        ages: npt.NDArray[np.int64],
        uses: PageUses,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The pages that ``layers`` would like to recall after their attention.

        Args:
            layers: ``[n]`` ascending.
            missed: ``[n, B, k]`` pages that were left to the CPU, -1 padded.
            ages: ``[B]`` steps that each request has done before this one.
            uses: how much every page of every layer has been selected lately.
        Returns:
            Layers and pages, distinct pairs.
        """

    def fill_pages(self) -> int:
        """Pages that this step may copy ahead of any miss, into slots that nobody wants."""

    def warm_columns(self, n_full: int, quota_pages: int) -> npt.NDArray[np.int64]:
        """Columns of a fresh request's page table to load before its first step."""

    def describe(self) -> dict[str, Any]:
        """State for operators: plain numbers, strings and lists."""


@dataclass(frozen=True)
class Policy:
    """A named point in the space of the four axes."""

    name: str
    digest: DigestAxis
    predictor: PredictorAxis
    missing: MissingAxis
    residency: ResidencyAxis
