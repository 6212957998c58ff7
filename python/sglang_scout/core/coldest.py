"""The slots of the coldest pages, of many layers at once and without sorting all of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout.core.ranking import Ints, bits_of, least_of_each

Floats = npt.NDArray[np.float32]

_FINITE = np.finfo(np.float32).max


class ColdSlots:
    """Finds the slots whose pages are the coldest of their layer.

    To collect the heat of all slots takes as long as all the rest, and between two steps it is asked
    for twice. So it is kept until pages are selected again.

    Args:
        page_of: ``[L, S]`` int32, page of a slot; negative: not a mapped one.
        heat: ``[L, P]`` float32, 0 or more.
        stamp: ``[L, P]`` int64. All three are read, and written by their owner.
    """

    def __init__(
        self, page_of: npt.NDArray[np.int32], heat: Floats, stamp: npt.NDArray[np.int64]
    ) -> None:
        self._page_of, self._heat, self._stamp = page_of, heat.reshape(-1), stamp.reshape(-1)
        self._num_pages = heat.shape[1]
        self._heat_of = np.zeros(page_of.shape, np.float32)  # of a slot's page; inf: has none
        self._is_known = np.zeros(len(page_of), bool)  # whether it holds, per layer
        self._protected = 0  # at the last look: cold slots of a layer that had to stay, at most

    def forget(self, layer: Ints | int | slice) -> None:
        """Heat of ``layer`` has changed."""
        self._is_known[layer] = False

    def mapped(self, layers: Ints, slots: Ints, keys: Ints) -> None:
        """These slots got pages, whose heat is at ``keys``."""
        self._heat_of[layers, slots] = self._heat[keys]

    def unmapped(self, layers: Ints, slots: npt.NDArray[np.integer]) -> None:
        """These slots lost their pages."""
        self._heat_of[layers, slots] = np.inf

    def find(
        self, counts: Ints, before_step: int, below: Floats | None = None
    ) -> tuple[Ints, Ints, Floats]:
        """The ``counts[l]`` coldest pages of each layer l that have no stamp of ``before_step`` or later.

        Args:
            counts: ``[L]`` int64; 0 or less: none.
            below: ``[L]``, only pages with less heat than this; None: any.
        Returns:
            Layers, slots and heat, by layer and then from the coldest on; with equal heat the older
            stamp comes first. Fewer of a layer where there are no more.
        """
        layers = np.flatnonzero(counts > 0)
        counts = counts[layers]
        limit = np.full(len(layers), np.inf, np.float32) if below is None else below[layers]
        heat_of, pages = self._of_layers(layers)
        last = heat_of.shape[1] - 1
        most = min(int(counts.max(initial=0)) + self._protected, last)
        while True:
            bound = np.partition(heat_of, most, axis=1)[:, most]
            at = np.flatnonzero(heat_of <= np.minimum(bound, _FINITE)[:, None])
            rows = at // heat_of.shape[1]
            keys = layers[rows] * self._num_pages + pages.reshape(-1)[at]
            heat, stamps = heat_of.reshape(-1)[at], self._stamp[keys]
            must_stay = stamps >= before_step
            may_go = np.flatnonzero(~must_stay & (heat < limit[rows]))
            self._protected = int(np.bincount(rows[must_stay], minlength=1).max())
            at, rows, heat, stamps = at[may_go], rows[may_go], heat[may_go], stamps[may_go]
            found = least_of_each(rows, bits_of(heat), counts, stamps)
            short = np.bincount(rows[found], minlength=len(layers)) < counts
            if most == last or not (short & (bound < limit)).any():
                break
            most = min(2 * most + 1, last)
        slots = at[found] - rows[found] * heat_of.shape[1]
        return layers[rows[found]], slots, heat[found]

    def _of_layers(self, layers: Ints) -> tuple[Floats, npt.NDArray[np.int32]]:
        """``[n, S]`` heat and page of each slot of ``layers`` ``[n]``."""
        new = layers[~self._is_known[layers]]
        if len(new):
            pages = self._page_of[new]
            heat = self._heat.take(new[:, None] * self._num_pages + pages, mode="wrap")
            heat[pages < 0] = np.inf
            self._heat_of[new] = heat
            self._is_known[new] = True
        return self._heat_of[layers], self._page_of[layers]
