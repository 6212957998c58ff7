"""Which (layer, page) lies in which device slot, and since when it was of use.

Residency is a property of a (layer, page), not of a request: a page that two requests share through
the radix cache is resident once. The table only keeps books; ``engine/`` moves the bytes.

States of a slot: free, reserved (a copy into it is under way) or mapped to one page. A page that is
freed or overwritten gets a new *generation*: copies that were started for the old content are then
refused at commit, so a slot never shows another request's page.

How useful a (layer, page) has been is its *heat*: one for each request and step that selected it,
halved every ``half_life_steps``. Pages that are not resident have heat too, so a copy can be judged
before it is made: a page takes another one's slot only if it is clearly hotter. Recency alone is a
poor judge: a page that is selected once pushes out one that is selected every other step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]

_NONE = np.zeros(0, np.int64)
_FREE = -1
_RESERVED = -2

DEFAULT_HALF_LIFE_STEPS = 8.0
SWAP_MARGIN = 1.5
"""How many times hotter a page must be than the one whose slot it takes. Without a margin two pages
of equal use change places for ever; measured, it halves the copies for the same misses."""

# Heat is kept in units that grow with the step, so that nothing has to decay page by page. Before
# they outgrow float32, everything is scaled down by this power of two.
_RESCALE_LOG2 = 64


@dataclass(frozen=True)
class Reservation:
    """Slots taken for a copy: ``pages[i]`` of ``layer`` goes to ``slots[i]``."""

    layer: int
    pages: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class ResidencyTable:
    """Books of the device's page slots, for all layers.

    Args:
        num_layers: L.
        num_pages: P, host pages including the padding page 0.
        num_slots: slots per layer.
        half_life_steps: steps after which a selection counts half.

    Attributes:
        slot_of: ``[L, P]`` int32, slot of a page or -1. Shared with the engine, which reads it.
        stamp: ``[L, P]`` int64, step in which the page was last selected or landed, -1: never. Pages
            on their way have one too: what this step looked for is not given up as it lands.
        heat: ``[L, P]`` float32, see above; only comparisons within one step mean something.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        half_life_steps: float = DEFAULT_HALF_LIFE_STEPS,
    ) -> None:
        if min(num_layers, num_pages, num_slots) <= 0:
            raise ValueError(f"empty table: {num_layers=} {num_pages=} {num_slots=}")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.slot_of = np.full((num_layers, num_pages), -1, np.int32)
        self.page_of = np.full((num_layers, num_slots), _FREE, np.int32)
        self.stamp = np.full((num_layers, num_pages), -1, np.int64)
        self.heat = np.zeros((num_layers, num_pages), np.float32)
        self._half_life_steps = half_life_steps
        self._scaled_at_step = 0
        # Heat, in selections, of a page that has been selected in every step for long.
        self._steady_heat = 1 / (1 - 2 ** (-1 / half_life_steps))
        self._pending = np.zeros((num_layers, num_pages), bool)
        self._generation = np.zeros(num_pages, np.int64)
        self._free = np.tile(np.arange(num_slots, dtype=np.int64), (num_layers, 1))
        self._num_free = np.full(num_layers, num_slots, np.int64)
        self._changed: list[npt.NDArray[np.int64]] | None = None

    def take_changes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """What :attr:`slot_of` has changed since the last call, for a copy of it elsewhere.

        The first call returns nothing and begins to record.

        Returns:
            ``[n]`` distinct indices into the flattened table, and ``[n]`` what stands there now.
        """
        changed = np.unique(np.concatenate(self._changed)) if self._changed else _NONE
        self._changed = []
        return changed, self.slot_of.reshape(-1)[changed]

    def _set_slots(self, layer: int, pages: Ints, slots: Ints | int) -> None:
        self.slot_of[layer, pages] = slots
        if self._changed is not None:
            self._changed.append(layer * self.num_pages + pages.astype(np.int64))

    def num_free(self, layer: int) -> int:
        """Slots of ``layer`` that are neither mapped nor reserved."""
        return int(self._num_free[layer])

    @property
    def resident_pages(self) -> int:
        """Mapped (layer, page) pairs over all layers."""
        return int((self.page_of >= 0).sum())

    def missing(self, layer: int, pages: Ints) -> npt.NDArray[np.int64]:
        """The distinct ids of ``pages`` that are neither resident nor on their way, ascending."""
        ids = np.unique(pages[pages >= 0]).astype(np.int64)
        return ids[(self.slot_of[layer, ids] < 0) & ~self._pending[layer, ids]]

    def touch(
        self, layer: int, pages: Ints, step: int, fresh: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Note that ``pages`` (-1 entries ignored) were selected in ``step``.

        Args:
            pages: ``[B, k]`` or any other shape.
            fresh: ``[B]`` rows of ``pages`` that belong to requests without a past. Their pages
                count as if they had been selected for long: a newcomer's cold pages could not take
                a slot from anybody for many steps.
        """
        is_page = pages >= 0
        ids = pages[is_page]
        self.stamp[layer, ids] = step
        weight = np.float32(self._weight(step))
        if fresh is None or not fresh.any():
            np.add.at(self.heat[layer], ids, weight)
            return
        weights = np.where(fresh, np.float32(weight * self._steady_heat), weight)[:, None]
        np.add.at(self.heat[layer], ids, np.broadcast_to(weights, pages.shape)[is_page])

    def _weight(self, step: int) -> float:
        """Heat of one selection in ``step``."""
        grown = (step - self._scaled_at_step) / self._half_life_steps
        if grown > _RESCALE_LOG2:
            self.heat *= np.float32(2.0 ** -min(grown, 120.0))
            self.heat[self.heat < 2.0**-60] = 0.0
            self._scaled_at_step, grown = step, 0.0
        return float(2.0**grown)

    def touch_all_layers(self, pages: Ints, step: int) -> None:
        """Protect ``pages`` in ``step``, in every layer; says nothing about their heat."""
        self.stamp[:, pages[pages >= 0]] = step

    def reserve(self, layer: int, pages: Ints) -> Reservation:
        """Take free slots for those of ``pages`` that are missing, hottest first as far as they go."""
        ids = self.missing(layer, pages)
        free = int(self._num_free[layer])
        if len(ids) > free:
            ids = np.sort(self._hottest_first(layer, ids)[:free])
        return self._reserve(layer, ids)

    def exchange(self, layer: int, pages: Ints, before_step: int) -> Reservation:
        """As :meth:`reserve`; when free slots end, clearly colder pages give theirs.

        Only pages last selected before ``before_step`` go, each for one that is ``SWAP_MARGIN`` times
        as hot. The caller must be done with reading the layer's slots in this step.
        """
        ids = self.missing(layer, pages)
        short = len(ids) - int(self._num_free[layer])
        if short > 0:
            ids = self._hottest_first(layer, ids)
            heat = self.heat[layer]
            slots = self._evictable(layer, before_step)
            coldness = heat[self.page_of[layer, slots]]
            coldest = np.argsort(coldness, kind="stable")[:short]
            rivals = ids[int(self._num_free[layer]) :][: len(coldest)]
            wins = heat[rivals] > SWAP_MARGIN * coldness[coldest]
            # Rivals grow colder and the others hotter, so the wins come first.
            count = int(wins.sum())
            self._unmap(layer, slots[coldest[:count]])
            ids = np.sort(ids[: int(self._num_free[layer])])
        return self._reserve(layer, ids)

    def _hottest_first(self, layer: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return ids[np.argsort(-self.heat[layer, ids], kind="stable")]

    def _reserve(self, layer: int, ids: npt.NDArray[np.int64]) -> Reservation:
        end = self._num_free[layer]
        slots = self._free[layer, end - len(ids) : end].copy()
        self._num_free[layer] = end - len(ids)
        self.page_of[layer, slots] = _RESERVED
        self._pending[layer, ids] = True
        return Reservation(layer, ids, slots, self._generation[ids].copy())

    def commit(self, reservation: Reservation, step: int) -> int:
        """The copies have landed: map the pages. Returns how many were still wanted."""
        layer = reservation.layer
        current = reservation.generations == self._generation[reservation.pages]
        pages, slots = reservation.pages[current], reservation.slots[current]
        self._set_slots(layer, pages, slots)
        self.page_of[layer, slots] = pages
        self.stamp[layer, pages] = np.maximum(self.stamp[layer, pages], step)
        self._pending[layer, pages] = False
        self._give_back(layer, reservation.slots[~current])
        return len(pages)

    def evict(self, layer: int, want_free: int, before_step: int) -> int:
        """Unmap the coldest pages until ``want_free`` slots are free.

        Only pages last selected before ``before_step`` go. Returns how many went.
        """
        short = want_free - int(self._num_free[layer])
        if short <= 0:
            return 0
        slots = self._evictable(layer, before_step)
        if len(slots) > short:
            pages = self.page_of[layer, slots]
            order = np.lexsort((self.stamp[layer, pages], self.heat[layer, pages]))
            slots = slots[order[:short]]
        self._unmap(layer, slots)
        return len(slots)

    def _evictable(self, layer: int, before_step: int) -> npt.NDArray[np.int64]:
        slots = np.flatnonzero(self.page_of[layer] >= 0)
        return slots[self.stamp[layer, self.page_of[layer, slots]] < before_step]

    def _unmap(self, layer: int, slots: npt.NDArray[np.int64]) -> None:
        self._set_slots(layer, self.page_of[layer, slots], -1)
        self._give_back(layer, slots)

    def invalidate(self, pages: Ints) -> None:
        """``pages`` were freed or will be overwritten: drop them in every layer."""
        ids = np.unique(pages).astype(np.int64)
        self._generation[ids] += 1
        self._pending[:, ids] = False
        self.heat[:, ids] = 0.0
        self.stamp[:, ids] = -1
        slots = self.slot_of[:, ids]
        for layer in map(int, np.flatnonzero((slots >= 0).any(axis=1))):
            mapped = slots[layer] >= 0
            self._give_back(layer, slots[layer][mapped].astype(np.int64))
            self._set_slots(layer, ids[mapped], -1)

    def clear(self) -> None:
        """Drop every page (cache flush)."""
        self.invalidate(np.arange(self.num_pages))

    def _give_back(self, layer: int, slots: npt.NDArray[np.int64]) -> None:
        end = self._num_free[layer]
        self._free[layer, end : end + len(slots)] = slots
        self._num_free[layer] = end + len(slots)
        self.page_of[layer, slots] = _FREE

    def check(self) -> None:
        """Assert the invariants; for tests and debugging.

        Raises:
            AssertionError: slots lost or doubled, or the two directions of the map disagree.
        """
        for layer in range(self.num_layers):
            free = self._free[layer, : self._num_free[layer]]
            assert len(np.unique(free)) == len(free), f"layer {layer}: a slot is free twice"
            assert (self.page_of[layer, free] == _FREE).all(), f"layer {layer}: free but mapped"
            states = self.page_of[layer]
            assert (states == _FREE).sum() == len(free), f"layer {layer}: a free slot was lost"
            mapped = np.flatnonzero(states >= 0)
            assert (self.slot_of[layer, states[mapped]] == mapped).all(), f"layer {layer}: map"
            assert (self.slot_of[layer] >= 0).sum() == len(mapped), f"layer {layer}: stale page"
            reserved = (states == _RESERVED).sum()
            total = len(free) + len(mapped) + reserved
            assert total == self.num_slots, f"layer {layer}: {total} of {self.num_slots} slots"
            assert self._pending[layer].sum() <= reserved, f"layer {layer}: pending without a slot"
            both = self._pending[layer] & (self.slot_of[layer] >= 0)
            assert not both.any(), f"layer {layer}: pending and resident"
