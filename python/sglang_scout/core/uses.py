"""How much each (layer, page) has been of use, and which slots and pages follow from that.

The *heat* of a (layer, page) is one for each request and step that selected it, halved every
``half_life_steps``. Pages that are not resident have heat too, so a copy can be judged before it is
made: a page takes another one's slot only if it is clearly hotter. Recency alone is a poor judge: a
page that is selected once pushes out one that is selected every other step.

The passes here go over all that a step selected, or over all slots, however little changes. Between
two steps of a device they are most of the host's time, so ``ops/native_uses.py`` does them in C++.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_scout.core.ranking import distinct

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

DEFAULT_HALF_LIFE_STEPS = 8.0

# Heat is kept in units that grow with the step, so that nothing has to decay page by page. Before
# they outgrow float32, everything is scaled down by this power of two.
_RESCALE_LOG2 = 64


class PageUses:
    """Heat and stamp of every page of every layer, and those of the page in every slot.

    Args:
        num_layers: L.
        num_pages: P, host pages including the padding page 0.
        num_slots: S, slots per layer.
        half_life_steps: steps after which a selection counts half.

    Attributes:
        heat: ``[L, P]`` float32, see above; only comparisons within one step mean something.
        stamp: ``[L, P]`` int32, step in which the page was last selected or landed, -1: never. Pages
            on their way have one too: what this step looked for is not given up as it lands.
        page_of: ``[L, S]`` int32, page of a slot; negative: has none.
        slot_heat, slot_stamp: ``[L, S]`` float32 and int32, heat and stamp of that page; where there is
            none, heat is infinite.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        half_life_steps: float = DEFAULT_HALF_LIFE_STEPS,
    ) -> None:
        if min(num_layers, num_pages, num_slots) <= 0:
            raise ValueError(f"no uses to keep: {num_layers=} {num_pages=} {num_slots=}")
        # Side by side: every page is another line of memory, and both are wanted together.
        self.both = np.zeros((num_layers, num_pages, 2), np.int32)
        self.heat = self.both[..., 0].view(np.float32)
        self.stamp = self.both[..., 1]
        self.stamp[:] = -1
        self.page_of = np.full((num_layers, num_slots), -1, np.int32)
        self.slot_heat = np.full((num_layers, num_slots), np.inf, np.float32)
        self.slot_stamp = np.full((num_layers, num_slots), -1, np.int32)
        self._of_slots = self.page_of, self.slot_heat, self.slot_stamp
        self._half_life_steps = half_life_steps
        self._scaled_at_step = 0
        # Heat, in selections, of a page that has been selected in every step for long.
        self._steady_heat = 1 / (1 - 2 ** (-1 / half_life_steps))

    def count(self, pages: npt.NDArray[np.int32]) -> Ids:
        """``[n, B]`` how many there are in each row of ``pages`` ``[n, B, k]``, -1 where there is none."""
        return np.count_nonzero(pages >= 0, axis=2)

    def touch(self, layers: Ids, pages: npt.NDArray[np.int32], step: int, fresh: Flags) -> None:
        """Note that ``pages`` were selected in ``step``.

        Args:
            layers: ``[n]``; pages: ``[n, B, k]`` of these layers, -1 where there is none.
            fresh: ``[B]`` rows of requests without a past. Their pages count as if they had been
                selected for long: a newcomer's cold pages could not take a slot from anybody for
                many steps.
        """
        weight = np.float32(self._weight(step))
        heavy = np.float32(weight * self._steady_heat)
        self._touch(layers, pages, step, np.where(fresh, heavy, weight))

    def _touch(self, layers: Ids, pages: npt.NDArray[np.int32], step: int, weights: Floats) -> None:
        at = np.nonzero(pages >= 0)
        where = layers[at[0]], pages[at]
        self.stamp[where] = step
        np.add.at(self.heat, where, weights[at[1]])
        self._follow(layers)

    def _follow(self, layers: Ids) -> None:
        """Heat and stamp in the slots of ``layers`` anew."""
        pages = self.page_of[layers]
        at = layers[:, None], pages
        self.slot_heat[layers] = np.where(pages >= 0, self.heat[at], np.float32(np.inf))
        self.slot_stamp[layers] = np.where(pages >= 0, self.stamp[at], -1)

    def protect(self, pages: Ids, slot_of: npt.NDArray[np.int32], step: int) -> int:
        """``pages`` ``[n]`` are in use in ``step``, in every layer; says nothing about their heat.

        Args:
            slot_of: ``[L, P]`` slot of each page, -1: none.
        Returns:
            How many have none, over all layers.
        """
        self.stamp[:, pages] = step
        slots = slot_of[:, pages]
        layers, which = np.nonzero(slots >= 0)
        self.slot_stamp[layers, slots[layers, which]] = step
        return slots.size - len(layers)

    def _weight(self, step: int) -> float:
        """Heat of one selection in ``step``."""
        grown = (step - self._scaled_at_step) / self._half_life_steps
        if grown > _RESCALE_LOG2:
            self.heat *= np.float32(2.0 ** -min(grown, 120.0))
            self.heat[self.heat < 2.0**-60] = 0.0
            self._follow(np.arange(len(self.heat)))
            self._scaled_at_step, grown = step, 0.0
        return float(2.0**grown)

    def map(self, layers: Ids, slots: Ids, pages: Ids, step: int) -> None:
        """``pages[i]`` of ``layers[i]`` came to ``slots[i]``, as if last selected in ``step``."""
        self.stamp[layers, pages] = stamps = np.maximum(self.stamp[layers, pages], step)
        self.page_of[layers, slots] = pages
        self.slot_heat[layers, slots] = self.heat[layers, pages]
        self.slot_stamp[layers, slots] = stamps

    def unmap(self, layers: Ids, slots: npt.NDArray[np.integer], state: int) -> None:
        """There is no page in ``slots`` any more; what says so in :attr:`page_of` is ``state`` < 0."""
        self.page_of[layers, slots] = state
        self.slot_heat[layers, slots] = np.inf

    def forget(self, pages: Ids) -> None:
        """``pages`` have new content in every layer, and none of them is in a slot."""
        self.heat[:, pages] = 0.0
        self.stamp[:, pages] = -1

    def coldest(self, counts: Ids, before_step: int, below: Floats) -> tuple[Ids, Ids, Floats]:
        """Slots whose pages are the coldest of their layer.

        Args:
            counts: ``[L]`` slots of each layer; 0 or less: none.
            before_step: only pages with an older stamp.
            below: ``[L]`` only pages with less heat; may be infinite.
        Returns:
            Layers, slots and heat, by layer and then from the coldest on; with equal heat the older
            stamp comes first, then the smaller slot. Fewer of a layer where there are no more.
        """
        layers, slots = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for layer in np.flatnonzero(counts > 0):
            own = np.flatnonzero(self.page_of[layer] >= 0)
            heat, stamp = (of[layer, self.page_of[layer, own]] for of in (self.heat, self.stamp))
            may_go = np.flatnonzero((stamp < before_step) & (heat < below[layer]))
            order = np.lexsort((stamp[may_go], heat[may_go]))[: counts[layer]]
            slots.append(own[may_go[order]])
            layers.append(np.full(len(order), layer))
        found = np.concatenate(layers), np.concatenate(slots)
        return *found, self.slot_heat[found]

    def hottest(
        self,
        layers: Ids,
        missed: npt.NDArray[np.int32],
        counts: Flags,
        is_first: Flags,
        limit_pages: Ids,
    ) -> tuple[Ids, Ids]:
        """Of each layer the ``limit_pages[i]`` pages of ``missed[i]`` that are worth most.

        Those of first rows come before all others, then the hottest: selected lately, often, and by
        many requests, whom one copy serves together; then the smaller id.

        Args:
            layers: ``[n]``; limit_pages: ``[n]``.
            missed: ``[n, B, k]`` page ids, -1 padded.
            counts: ``[n, B]`` rows of each layer whose pages may be chosen.
            is_first: ``[B]`` rows whose pages come first.
        Returns:
            Layers and pages, distinct pairs, in the order of ``layers`` and then ascending.
        """
        found = [np.zeros((2, 0), np.int64)]
        for layer, of_rows, rows, limit in zip(layers, missed, counts, limit_pages, strict=True):
            pages = distinct(of_rows[rows][of_rows[rows] >= 0])
            is_later = ~np.isin(pages, of_rows[rows & is_first])
            order = np.lexsort((-self.heat[layer, pages], is_later))
            best = np.sort(pages[order[: max(limit, 0)]])
            found.append(np.stack([np.full(len(best), layer), best]))
        at = np.concatenate(found, axis=1)
        return at[0], at[1]
