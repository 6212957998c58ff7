"""Which (layer, page) lies in which device slot, and since when it was of use.

Residency is a property of a (layer, page), not of a request: a page that two requests share through
the radix cache is resident once. The table only keeps books; ``engine/`` moves the bytes.

States of a slot: free, reserved (a copy into it is under way) or mapped to one page. A page that is
freed or overwritten gets a new *generation*: copies that were started for the old content are then
refused at commit, so a slot never shows another request's page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]

_FREE = -1
_RESERVED = -2


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

    Attributes:
        slot_of: ``[L, P]`` int32, slot of a page or -1. Shared with the engine, which reads it.
        stamp: ``[L, num_slots]`` int64, step in which the slot's page was last selected.
    """

    def __init__(self, num_layers: int, num_pages: int, num_slots: int) -> None:
        if min(num_layers, num_pages, num_slots) <= 0:
            raise ValueError(f"empty table: {num_layers=} {num_pages=} {num_slots=}")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.slot_of = np.full((num_layers, num_pages), -1, np.int32)
        self.page_of = np.full((num_layers, num_slots), _FREE, np.int32)
        self.stamp = np.full((num_layers, num_slots), -1, np.int64)
        self._pending = np.zeros((num_layers, num_pages), bool)
        self._generation = np.zeros(num_pages, np.int64)
        self._free = np.tile(np.arange(num_slots, dtype=np.int64), (num_layers, 1))
        self._num_free = np.full(num_layers, num_slots, np.int64)
        self._layers = np.arange(num_layers)[:, None]

    def num_free(self, layer: int) -> int:
        """Slots of ``layer`` that are neither mapped nor reserved."""
        return int(self._num_free[layer])

    @property
    def resident_pages(self) -> int:
        """Mapped (layer, page) pairs over all layers."""
        return int((self.page_of >= 0).sum())

    def missing(self, layer: int, pages: Ints) -> npt.NDArray[np.int64]:
        """The distinct ids of ``pages`` that are neither resident nor on their way in ``layer``."""
        ids = np.unique(pages[pages >= 0]).astype(np.int64)
        return ids[(self.slot_of[layer, ids] < 0) & ~self._pending[layer, ids]]

    def touch(self, layer: int, pages: Ints, step: int) -> None:
        """Note that ``pages`` (-1 entries ignored) were of use in ``step``."""
        slots = self.slot_of[layer, pages[pages >= 0]]
        self.stamp[layer, slots[slots >= 0]] = step

    def touch_all_layers(self, pages: Ints, step: int) -> None:
        """As :meth:`touch`, for every layer at once."""
        slots = self.slot_of[:, pages[pages >= 0]]
        layers = np.broadcast_to(self._layers, slots.shape)
        resident = slots >= 0
        self.stamp[layers[resident], slots[resident]] = step

    def reserve(self, layer: int, pages: Ints) -> Reservation:
        """Take free slots for those of ``pages`` that are missing, as far as the slots go."""
        ids = self.missing(layer, pages)[: self._num_free[layer]]
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
        self.slot_of[layer, pages] = slots
        self.page_of[layer, slots] = pages
        self.stamp[layer, slots] = step
        self._pending[layer, pages] = False
        self._give_back(layer, reservation.slots[~current])
        return len(pages)

    def evict(self, layer: int, want_free: int, before_step: int) -> int:
        """Unmap the least recently useful pages until ``want_free`` slots are free.

        Only pages last of use before ``before_step`` go. Returns how many went.
        """
        short = want_free - int(self._num_free[layer])
        if short <= 0:
            return 0
        slots = np.flatnonzero((self.page_of[layer] >= 0) & (self.stamp[layer] < before_step))
        if len(slots) > short:
            oldest = np.argpartition(self.stamp[layer, slots], short - 1)[:short]
            slots = slots[oldest]
        self.slot_of[layer, self.page_of[layer, slots]] = -1
        self._give_back(layer, slots)
        return len(slots)

    def invalidate(self, pages: Ints) -> None:
        """``pages`` were freed or will be overwritten: drop them in every layer."""
        ids = np.unique(pages).astype(np.int64)
        self._generation[ids] += 1
        self._pending[:, ids] = False
        slots = self.slot_of[:, ids]
        for layer in np.flatnonzero((slots >= 0).any(axis=1)):
            self._give_back(layer, slots[layer][slots[layer] >= 0].astype(np.int64))
        self.slot_of[:, ids] = -1

    def clear(self) -> None:
        """Drop every page (cache flush)."""
        self.invalidate(np.arange(self.num_pages))

    def _give_back(self, layer: int, slots: npt.NDArray[np.int64]) -> None:
        end = self._num_free[layer]
        self._free[layer, end : end + len(slots)] = slots
        self._num_free[layer] = end + len(slots)
        self.page_of[layer, slots] = _FREE
        self.stamp[layer, slots] = -1

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
            both = self._pending[layer] & (self.slot_of[layer] >= 0)
            assert not both.any(), f"layer {layer}: pending and resident"
