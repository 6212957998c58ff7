"""The slots of the coldest pages of many layers, without a look at all of them each time.

Heat never falls (``core/pages.py``), so a slot that is not among the coldest of its layer now will not be
among them before the others have been given away: until then it is enough to look at those that were
cold once and at those that got another page since.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout.core.ranking import Ints, bits_of, least_of_each

CANDIDATE_SHARE = 16
"""One of so many slots is a candidate right after a look at all."""
_LEAST_CANDIDATES = 64


class ColdSlots:
    """Finds the slots whose pages are the coldest of their layer.

    Args:
        page_of: ``[L, S]`` int32, page of a slot; negative: not a mapped one.
        heat: ``[L, P]`` float32, 0 or more; falls only for pages without a slot.
        stamp: ``[L, P]`` int64. All three are read, and written by their owner.
    """

    def __init__(
        self,
        page_of: npt.NDArray[np.int32],
        heat: npt.NDArray[np.float32],
        stamp: npt.NDArray[np.int64],
    ) -> None:
        self._page_of, self._heat, self._stamp = page_of, heat.reshape(-1), stamp.reshape(-1)
        self._num_pages = heat.shape[1]
        layers, slots = page_of.shape
        self._candidates = max(_LEAST_CANDIDATES, slots // CANDIDATE_SHARE)
        self._is_candidate = np.zeros((layers, slots), bool)
        # No page of another slot is colder than this. So far there are no pages.
        self._bound = np.full(layers, np.inf, np.float32)

    def mapped(self, layers: Ints, slots: Ints) -> None:
        """These slots got a page."""
        self._is_candidate[layers, slots] = True

    def rescaled(self) -> None:
        """All heat was divided by a number."""
        self._bound[:] = -1.0

    def find(self, counts: Ints, before_step: int) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
        """The ``counts[l]`` coldest pages of each layer l that have no stamp of ``before_step`` or later.

        Args:
            counts: ``[L]`` int64; 0 or less: none.
        Returns:
            Layers, slots and heat, by layer and then from the coldest on; with equal heat the older
            stamp comes first. Fewer of a layer where there are no more.
        """
        layers = np.flatnonzero(counts > 0)
        crowd = np.count_nonzero(self._is_candidate[layers], axis=1) > 2 * self._candidates
        if crowd.any():
            self._look_at_all(layers[crowd])
        parts = []
        for attempt in range(3):  # among the candidates, among new ones, among all slots
            if attempt == 1:
                self._look_at_all(layers)
            chosen = self._is_candidate[layers]
            if attempt == 2:
                chosen[:] = True
            rows, slots, heat, is_sure = self._among(layers, chosen, counts[layers], before_step)
            is_sure |= attempt == 2
            keep = is_sure[rows]
            parts.append((layers[rows[keep]], slots[keep], heat[keep]))
            layers = layers[~is_sure]
            if not len(layers):
                break
        if len(parts) == 1:
            return parts[0]
        found, slots, heat = map(np.concatenate, zip(*parts, strict=True))
        order = np.argsort(found, kind="stable")
        return found[order], slots[order], heat[order]

    def _among(
        self, layers: Ints, chosen: npt.NDArray[np.bool_], counts: Ints, before_step: int
    ) -> tuple[Ints, Ints, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """The coldest of ``chosen`` ``[n, S]`` slots of ``layers`` ``[n]``: rows of these, slots and
        heat; and for each row whether no other slot can be colder."""
        rows, slots = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
        layer = layers[rows]
        pages = self._page_of[layer, slots]
        keys = layer * self._num_pages + pages
        may_go = np.flatnonzero((pages >= 0) & (self._stamp[keys] < before_step))
        rows, slots, keys = rows[may_go], slots[may_go], keys[may_go]
        heat = self._heat[keys]
        near = least_of_each(rows, bits_of(heat), counts, self._stamp[keys])
        taken = np.bincount(rows[near], minlength=len(layers))
        warmest = np.zeros(len(layers), np.float32)
        warmest[rows[near]] = heat[near]  # the last one stays
        bound = self._bound[layers]
        is_sure = np.isinf(bound) | ((taken == counts) & (warmest < bound))
        return rows[near], slots[near], heat[near], is_sure

    def _look_at_all(self, layers: Ints) -> None:
        """Choose the candidates of ``layers`` anew."""
        pages = self._page_of[layers]
        heat = self._heat.take(layers[:, None] * self._num_pages + pages, mode="wrap")
        heat[pages < 0] = np.inf
        last = min(self._candidates, heat.shape[1] - 1)
        bound = np.partition(heat, last, axis=1)[:, last]
        self._bound[layers] = bound
        self._is_candidate[layers] = heat < bound[:, None]
