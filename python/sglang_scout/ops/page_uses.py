"""Recent use of every page of every layer, as a decayed (LFU-like) frequency.

The *decayed frequency* of a (layer, page) grows by one for each list of a request and step that selects it and halves
every ``half_life_steps``. Non-resident pages have one too, so a copy can be judged before it is made: a page
evicts another only if it is clearly more frequent. Recency alone (LRU) is a poor criterion: a page that is
selected once would evict one that is selected every other step.

If each KV head has its own list, a page gains one for every head that selected it. The frequency is thus the
accumulated importance score of RheoServe's cache recorder (item 10), which specifies neither decay nor score: the
decay and counting heads are ours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout import _native

Ids = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

# Frequencies are kept in units that grow with the step, so that no per-page decay is needed.
# Before they overflow float32, everything is scaled down by this power of two.
_RESCALE_LOG2 = 64
# Stamps are int32. Before steps overflow them, they are rebased, keeping the latest.
_LAST_STAMP = 2**30
_KEPT_STAMPS = 2**20


class PageUses:
    """How often every page of every layer was selected recently.

    Attributes:
        frequency: ``[L, P]`` float32, decayed; only comparisons within one step are meaningful.
        stamp: ``[L, P]`` int32, :meth:`stamp_of` the step in which the page was last selected or landed, -1:
            never. In-flight pages have one too, so a page that this step selected is not evicted as it lands.
    """

    def __init__(self, metadata: _native.Residency, half_life_steps: float) -> None:
        self._metadata = metadata
        self.frequency, self.stamp = metadata.frequency, metadata.stamp
        self._half_life_steps = half_life_steps
        self._scaled_at_step = self._first_step = 0
        # Steady-state frequency, in selections, of a page that is selected in every step.
        self._steady = 1 / (1 - 2 ** (-1 / half_life_steps))

    def stamp_of(self, step: int) -> int:
        """``step`` relative to the current stamp base."""
        return step - self._first_step

    def count(self, pages: Pages) -> Ids:
        """``[n, B]`` number of pages in each row of ``pages`` ``[n, B, k]``, which is padded with -1."""
        return _native.count_pages(pages)

    def touch(self, layers: Ids, pages: Pages, step: int, fresh: Flags) -> None:
        """Note that ``pages`` were selected in ``step``.

        Args:
            layers: ``[n]``; pages: ``[n, B, k]`` of these layers, padded with -1.
            fresh: ``[B]`` rows of requests without history. Their pages start at the steady-state frequency:
                otherwise an arriving request's pages could not evict any for many steps.
        """
        weight = np.float32(self._weight(step))
        heavy = np.float32(weight * self._steady)
        self._metadata.touch(layers, pages, np.where(fresh, heavy, weight), self.stamp_of(step))

    def _weight(self, step: int) -> float:
        """Frequency added by one selection in ``step``."""
        grown = (step - self._scaled_at_step) / self._half_life_steps
        if grown > _RESCALE_LOG2:
            self.frequency *= np.float32(2.0 ** -min(grown, 120.0))
            self.frequency[self.frequency < 2.0**-60] = 0.0
            if (passed := self.stamp_of(step) - _KEPT_STAMPS) > _LAST_STAMP:
                self.stamp[:] = np.maximum(self.stamp, passed - 1) - passed
                self._first_step += passed
            every = np.arange(len(self.frequency))
            nothing = np.zeros((len(every), 0, 0), np.int32)
            self._metadata.touch(every, nothing, np.zeros(0, np.float32), 0)  # the per-slot copies
            self._scaled_at_step, grown = step, 0.0
        return float(2.0**grown)

    def selected_since(self, layers: Ids, step: int) -> tuple[Ids, Ids]:
        """Distinct (layer, page) pairs of ``layers`` selected in ``step`` or later, as two arrays."""
        at, pages = np.nonzero(
            (self.stamp[layers] >= self.stamp_of(step)) & (self.frequency[layers] > 0)
        )
        return layers[at], pages

    def most_frequent(
        self, layers: Ids, missed: Pages, counts: Flags, is_first: Flags, limit_pages: Ids
    ) -> tuple[Ids, Ids]:
        """The ``limit_pages[i]`` pages of ``missed[i]`` most worth copying, for each layer.

        Pages of ``is_first`` rows precede all others, then by frequency (selected recently, often, and by many
        requests, which share one copy), then by smaller id.

        Args:
            layers: ``[n]``; limit_pages: ``[n]``.
            missed: ``[n, B, k]`` page ids, -1 padded.
            counts: ``[n, B]`` rows of each layer whose pages may be chosen.
            is_first: ``[B]`` rows whose pages have priority.
        Returns:
            Distinct (layer, page) pairs as two arrays, in the order of ``layers``, then ascending.
        """
        return self._metadata.most_frequent(layers, missed, counts, is_first, limit_pages)
