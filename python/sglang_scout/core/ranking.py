"""Sorting and counting within groups, for many layers at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_RANK_BITS = 33
_FEW = 256  # are sorted sooner than searched


def rank_within(groups: Ints) -> Ints:
    """``[n]`` place of each element in its group; equal ``groups`` ``[n]`` stand together, ascending."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def distinct(values: npt.NDArray[np.integer]) -> Ints:
    """As ``np.unique``, which hashes before it sorts and takes longer."""
    ordered = np.sort(values, axis=None).astype(np.int64)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def bits_of(values: npt.NDArray[np.float32]) -> Ints:
    """Integers below 2^31 in the order of ``values``, none of which is negative."""
    return (values + np.float32(0)).view(np.int32).astype(np.int64)  # -0.0 + 0.0 is 0.0


def least_of_each(groups: Ints, ranks: Ints, counts: Ints, ties: Ints | None = None) -> Ints:
    """The ``counts[g]`` elements of every group g with the smallest ranks, without a sort of all.

    Args:
        groups: ``[n]`` in [0, G).
        ranks: ``[n]`` in [0, 2^33).
        counts: ``[G]``, 0 or less: none.
        ties: ``[n]`` smaller first where ranks are equal; else, and without it, in their order here.
    Returns:
        Indices, by group and then from the smallest rank on; fewer of a group that has no more.
    """
    codes = (groups << _RANK_BITS) | ranks
    if len(codes) <= _FEW:
        order = np.lexsort((codes,) if ties is None else (ties, codes))
        return order[rank_within(groups[order]) < counts[groups[order]]]
    ordered = np.sort(codes)
    first = np.searchsorted(ordered, np.arange(len(counts) + 1) << _RANK_BITS)
    taken = np.minimum(counts, np.diff(first))
    last = np.append(ordered, 0)[first[:-1] + np.maximum(taken - 1, 0)]
    last[taken <= 0] = -1
    near = np.flatnonzero(codes <= last[groups])  # others with the rank of the last one too
    keys = (codes[near],) if ties is None else (ties[near], codes[near])
    near = near[np.lexsort(keys)]
    return near[rank_within(groups[near]) < taken[groups[near]]]
