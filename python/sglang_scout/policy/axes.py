"""The four axes on which GPU-CPU offload methods differ, and the policy that joins them.

The engine asks these objects and never asks which policy it serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class DigestAxis(Protocol):
    """How a page is summarised and scored."""

    @property
    def head_reduce(self) -> str:
        """How query heads' scores become one score per page (``ops/score.py``)."""

    @property
    def sink_pages(self) -> int:
        """Leading full pages that are selected whatever their score."""

    @property
    def recent_pages(self) -> int:
        """Newest full pages that are selected whatever their score."""


class PredictorAxis(Protocol):
    """Where the query comes from that selects pages and computes the missing ones."""

    @property
    def lead(self) -> int:
        """Layers of head start: 1 = predicted at the previous layer's input, 0 = the real query."""

    def targets(self, layer: int, num_layers: int) -> tuple[int, ...]:
        """Layers whose query is predicted at the input of ``layer``."""


class MissingAxis(Protocol):
    """Who computes selected pages that are not resident."""

    @property
    def copy_ahead(self) -> bool:
        """False: the CPU worker attends to them in place; True: they are copied to the device first."""


class ResidencyAxis(Protocol):
    """Which pages stay on the device and when missing ones are recalled."""

    def due(self, layer: int, step: int) -> bool:
        """Whether ``layer`` recalls its missing pages after its attention in ``step``."""

    def recall_fresh(self) -> bool:
        """Whether a request's first selections are recalled at once."""

    def warm_columns(self, n_full: int, quota_pages: int) -> npt.NDArray[np.int64]:
        """Columns of a fresh request's page table to load before its first step."""


@dataclass(frozen=True)
class Policy:
    """A named point in the space of the four axes."""

    name: str
    digest: DigestAxis
    predictor: PredictorAxis
    missing: MissingAxis
    residency: ResidencyAxis
