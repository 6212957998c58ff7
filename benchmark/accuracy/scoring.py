"""Statistics of correct answers: confidence intervals, and the paired loss of one policy against another.

Two policies that answered the same questions are compared question by question (paired): what both
got right or both got wrong carries no information about the difference. Shares are 0..1, losses in
points (100 points are a share of 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binom

Z_95 = 1.96


def wilson_interval(right: int, asked: int) -> tuple[float, float]:
    """95 % confidence interval of the share ``right / asked``; samples are independent."""
    share, n, z = right / asked, asked, Z_95
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Loss:
    """Loss of ``other`` against ``base`` on the same ``asked`` questions.

    ``lost``: right with base alone; ``gained``: right with other alone.
    """

    asked: int
    lost: int
    gained: int

    @property
    def points(self) -> float:
        return 100 * (self.lost - self.gained) / self.asked

    @property
    def interval_points(self) -> tuple[float, float]:
        """95 % interval after Agresti and Min (2005): half an observation more in each cell."""
        n, lost, gained = self.asked + 2, self.lost + 0.5, self.gained + 0.5
        centre = (lost - gained) / n
        half = Z_95 * math.sqrt(lost + gained - (lost - gained) ** 2 / n) / n
        return 100 * max(-1.0, centre - half), 100 * min(1.0, centre + half)


def paired_loss(base: Sequence[bool], other: Sequence[bool]) -> Loss:
    """Raises ValueError unless both answered the same, nonzero number of questions."""
    if len(base) != len(other) or not base:
        raise ValueError(f"{len(base)} and {len(other)} answers; compare the same questions")
    lost = sum(b and not o for b, o in zip(base, other, strict=True))
    gained = sum(o and not b for b, o in zip(base, other, strict=True))
    return Loss(len(base), lost, gained)


def margin_points(allowed_points: float, asked: int) -> float:
    """The largest acceptable loss in a sample of ``asked`` questions if the true loss is ``allowed_points``.

    The smallest margin that a policy with exactly that loss exceeds with a probability of at most 5 %.
    It approaches ``allowed_points`` as the sample grows. Raises ValueError for ``allowed_points``
    outside (0, 100).
    """
    rate = allowed_points / 100
    if not 0 < rate < 1:
        raise ValueError(f"allowed_points={allowed_points}: must lie between 0 and 100")
    return float(100 * binom.ppf(0.95, asked, rate) / asked)
