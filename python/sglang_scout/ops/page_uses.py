"""How much every page of every layer has been of use lately.

The *decayed frequency* of a (layer, page) is one for each list of a request and step that selected it, halved
every ``half_life_steps``. Pages that are not resident have one too, so a copy can be judged before it
is made: a page takes another one's slot only if it is clearly more frequent. Recency alone is a poor
judge: a page that is selected once pushes out one that is selected every other step.

Where each KV head has a list of its own, a page gains one for every head that chose it. So the frequency is the
accumulated importance score of RheoServe's cache recorder (item 10), whose decay and score are unstated: decayed,
and in heads, are ours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout import _native

Ids = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

# Frequencies are kept in units that grow with the step, so that nothing has to decay page by page.
# Before they outgrow float32, everything is scaled down by this power of two.
_RESCALE_LOG2 = 64
# Stamps are int32. Before steps outgrow them, they begin anew with the latest.
_LAST_STAMP = 2**30
_KEPT_STAMPS = 2**20


class PageUses:
    """How much every page of every layer has been selected lately.

    Attributes:
        frequency: ``[L, P]`` float32, decayed; only comparisons within one step mean something.
        stamp: ``[L, P]`` int32, :meth:`stamp_of` the step in which the page was last selected or landed, -1:
            never. Pages on their way have one too: what this step looked for is not given up as it lands.
    """

    def __init__(self, metadata: _native.Residency, half_life_steps: float) -> None:
        self._metadata = metadata
        self.frequency, self.stamp = metadata.frequency, metadata.stamp
        self._half_life_steps = half_life_steps
        self._scaled_at_step = self._first_step = 0
        # Frequency, in selections, of a page that has been selected in every step for long.
        self._steady = 1 / (1 - 2 ** (-1 / half_life_steps))

    def stamp_of(self, step: int) -> int:
        """``step`` as stamps count it."""
        return step - self._first_step

    def count(self, pages: Pages) -> Ids:
        """``[n, B]`` how many there are in each row of ``pages`` ``[n, B, k]``, -1 where there is none."""
        return _native.count_pages(pages)

    def touch(self, layers: Ids, pages: Pages, step: int, fresh: Flags) -> None:
        """Note that ``pages`` were selected in ``step``.

        Args:
            layers: ``[n]``; pages: ``[n, B, k]`` of these layers, -1 where there is none.
            fresh: ``[B]`` rows of requests without a past. Their pages count as if they had been
                selected for long: a newcomer's pages could not take a slot from anybody for many
                steps.
        """
        weight = np.float32(self._weight(step))
        heavy = np.float32(weight * self._steady)
        self._metadata.touch(layers, pages, np.where(fresh, heavy, weight), self.stamp_of(step))

    def _weight(self, step: int) -> float:
        """Frequency that one selection in ``step`` adds."""
        grown = (step - self._scaled_at_step) / self._half_life_steps
        if grown > _RESCALE_LOG2:
            self.frequency *= np.float32(2.0 ** -min(grown, 120.0))
            self.frequency[self.frequency < 2.0**-60] = 0.0
            if (passed := self.stamp_of(step) - _KEPT_STAMPS) > _LAST_STAMP:
                self.stamp[:] = np.maximum(self.stamp, passed - 1) - passed
                self._first_step += passed
            every = np.arange(len(self.frequency))
            nothing = np.zeros((len(every), 0, 0), np.int32)
            self._metadata.touch(every, nothing, np.zeros(0, np.float32), 0)  # the slots' copies
            self._scaled_at_step, grown = step, 0.0
        return float(2.0**grown)

    def selected_since(self, layers: Ids, step: int) -> tuple[Ids, Ids]:
        """Layers and pages, distinct pairs: those of ``layers`` that ``step`` or a later one selected."""
        at, pages = np.nonzero(
            (self.stamp[layers] >= self.stamp_of(step)) & (self.frequency[layers] > 0)
        )
        return layers[at], pages

    def most_frequent(
        self, layers: Ids, missed: Pages, counts: Flags, is_first: Flags, limit_pages: Ids
    ) -> tuple[Ids, Ids]:
        """Of each layer the ``limit_pages[i]`` pages of ``missed[i]`` that are worth most.

        Those of first rows come before all others, then the most frequent: selected lately, often, and
        by many requests, whom one copy serves together; then the smaller id.

        Args:
            layers: ``[n]``; limit_pages: ``[n]``.
            missed: ``[n, B, k]`` page ids, -1 padded.
            counts: ``[n, B]`` rows of each layer whose pages may be chosen.
            is_first: ``[B]`` rows whose pages come first.
        Returns:
            Layers and pages, distinct pairs, in the order of ``layers`` and then ascending.
        """
        return self._metadata.most_frequent(layers, missed, counts, is_first, limit_pages)
