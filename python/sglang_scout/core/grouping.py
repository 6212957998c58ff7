"""Sorting and counting within groups, for many layers at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def rank_within(groups: Ints) -> Ints:
    """``[n]`` index of each element in its group; ``groups`` ``[n]`` are sorted, ascending."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def distinct(values: npt.NDArray[np.integer]) -> Ints:
    """Like ``np.unique``, which is slower as it hashes before it sorts."""
    ordered = np.sort(values, axis=None).astype(np.int64)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered
