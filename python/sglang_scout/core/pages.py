"""Which (layer, page) lies in which device slot.

Residency is a property of a (layer, page), not of a request: a page that two requests share through
the radix cache is resident once. The table only keeps books; ``engine/`` moves the bytes.

States of a slot: free, reserved (a copy into it is under way) or mapped to one page. A page that is
freed or overwritten gets a new *generation*: copies that were started for the old content are then
refused at commit, so a slot never shows another request's page.

How useful a (layer, page) has been is its *heat* (``uses.py``).

All methods take many layers at once, for the host has no time for one after the other between two
steps of a device: ``layer`` is a number, or an array that broadcasts with ``pages``. Layers do not
affect each other. Within, a (layer, page) is its index in the flattened tables, its *key*. What a step
changes of the books, ``ops/native_slots.py`` does in C++.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_scout.core.ranking import distinct, rank_within
from sglang_scout.core.uses import PageUses

Ints = npt.NDArray[np.integer]

_NONE = np.zeros(0, np.int64)
_FREE = -1
_RESERVED = -2

SWAP_MARGIN = 1.5
"""How many times hotter a page must be than the one whose slot it takes. Without a margin two pages
of equal use change places for ever; measured, it halves the copies for the same misses."""


@dataclass(frozen=True)
class Reservation:
    """Slots taken for copies: ``pages[i]`` of ``layers[i]`` goes to ``slots[i]`` of that layer.

    Ordered by layer, then page.
    """

    layers: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]

    def per_layer(self, num_layers: int) -> npt.NDArray[np.int64]:
        """``[L]`` int64, pages of each layer."""
        return np.bincount(self.layers, minlength=num_layers)


class ResidencyTable:
    """Books of the device's page slots, for all layers.

    Args:
        uses: of L layers, P pages and S slots a layer. The table tells it which page is in which slot
            and what pages to forget; what was selected comes from others.

    Attributes:
        uses: as given.
        slot_of: ``[L, P]`` int32, slot of a page or -1. Shared with the engine, which reads it.
    """

    def __init__(self, uses: PageUses) -> None:
        self.uses = uses
        self.num_layers, self.num_pages = num_layers, num_pages = uses.heat.shape
        self.num_slots = num_slots = uses.page_of.shape[1]
        self.slot_of = np.full((num_layers, num_pages), -1, np.int32)
        self.page_of = uses.page_of
        self._pending = np.zeros((num_layers, num_pages), bool)
        self._generation = np.zeros(num_pages, np.int64)
        self._free = np.tile(np.arange(num_slots, dtype=np.int64), (num_layers, 1))
        self._num_free = np.full(num_layers, num_slots, np.int64)
        self._changed: list[npt.NDArray[np.int64]] | None = None
        # The same memory by key.
        self._slot, self._is_pending = self.slot_of.reshape(-1), self._pending.reshape(-1)
        self._heat = uses.heat.reshape(-1)

    def take_changes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """What :attr:`slot_of` has changed since the last call, for a copy of it elsewhere.

        The first call returns nothing and begins to record.

        Returns:
            ``[n]`` distinct indices into the flattened table, and ``[n]`` what stands there now.
        """
        changed = distinct(np.concatenate(self._changed)) if self._changed else _NONE
        self._changed = []
        return changed, self._slot[changed]

    def _note(self, changed: npt.NDArray[np.int64]) -> None:
        if self._changed is not None:
            self._changed.append(changed)

    def num_free(self, layer: int) -> int:
        """Slots of ``layer`` that are neither mapped nor reserved."""
        return int(self._num_free[layer])

    @property
    def resident_pages(self) -> int:
        """Mapped (layer, page) pairs over all layers."""
        return int((self.page_of >= 0).sum())

    def missing(self, layer: Ints | int, pages: Ints) -> npt.NDArray[np.int64]:
        """The distinct keys of ``pages`` that are neither resident nor on their way, ascending."""
        keys = (np.multiply(layer, self.num_pages) + pages)[pages >= 0]
        return self._absent(keys.astype(np.int64, copy=False))

    def _absent(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return distinct(keys[(self._slot[keys] < 0) & ~self._is_pending[keys]])

    def touch_all_layers(self, pages: Ints, step: int) -> int:
        """Protect ``pages`` in ``step``, in every layer; says nothing about their heat.

        Returns:
            How many of them are not resident, over all layers.
        """
        return self.uses.protect(pages[pages >= 0].astype(np.int64), self.slot_of, step)

    def are_resident(self, pages: Ints) -> bool:
        """Whether all of ``pages`` ``[n]`` are, in every layer."""
        return bool((np.take(self.slot_of, pages, axis=1) >= 0).all())

    def reserve(self, layer: Ints | int, pages: Ints) -> Reservation:
        """Take free slots for those of ``pages`` that are missing, hottest first as far as they go."""
        keys = self.missing(layer, pages)
        if (self._per_layer(keys) > self._num_free).any():
            keys, layers, rank = self._hottest_first(keys)
            keys = np.sort(keys[rank < self._num_free[layers]])
        return self._reserve(keys)

    def exchange(self, layer: Ints | int, pages: Ints, before_step: int) -> Reservation:
        """As :meth:`reserve`; when free slots end, clearly colder pages give theirs.

        Only pages last selected before ``before_step`` go, each for one that is ``SWAP_MARGIN`` times
        as hot. The caller must be done with reading the layer's slots in this step.
        """
        keys = self.missing(layer, pages)
        short = self._per_layer(keys) - self._num_free
        if (short > 0).any():
            keys, layers, rank = self._hottest_first(keys)
            heat = self._heat[keys]
            best = np.zeros(self.num_layers, np.float32)  # heat of the first to find no free slot
            is_best = rank == self._num_free[layers]
            best[layers[is_best]] = heat[is_best]
            below = best * np.float32(1.001 / SWAP_MARGIN)  # a little more than needed: rounding
            cold_layers, slots, coldness = self.uses.coldest(short, before_step, below)
            # The hottest that finds no free slot meets the coldest.
            rival = np.searchsorted(layers, cold_layers) + self._num_free[cold_layers]
            rival += rank_within(cold_layers)
            # Rivals grow colder and the others hotter, so the wins come first.
            wins = heat[rival] > SWAP_MARGIN * coldness
            self._unmap(cold_layers[wins], slots[wins])
            keys = np.sort(keys[rank < self._num_free[layers]])
        return self._reserve(keys)

    def _per_layer(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.bincount(keys // self.num_pages, minlength=self.num_layers)

    def _hottest_first(self, keys: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Ascending ``keys`` by layer and then falling heat; layers, and places within them."""
        layers = keys // self.num_pages
        order = np.lexsort((-self._heat[keys], layers))
        return keys[order], layers, rank_within(layers)

    def _reserve(self, keys: npt.NDArray[np.int64]) -> Reservation:
        layers, pages = np.divmod(keys, self.num_pages)
        self._num_free -= np.bincount(layers, minlength=self.num_layers)
        slots = self._free[layers, self._num_free[layers] + rank_within(layers)]
        self.uses.unmap(layers, slots, _RESERVED)
        self._is_pending[keys] = True
        return Reservation(layers, pages, slots, self._generation[pages])

    def commit(self, reservation: Reservation, step: int) -> int:
        """The copies have landed: map the pages. Returns how many were still wanted."""
        keys = self._land(reservation, step)
        self._note(keys)
        return len(keys)

    def _land(self, r: Reservation, step: int) -> npt.NDArray[np.int64]:
        current = r.generations == self._generation[r.pages]
        if not current.all():
            self._give_back(r.layers[~current], r.slots[~current])
        layers, pages, slots = r.layers[current], r.pages[current], r.slots[current]
        keys = layers * self.num_pages + pages
        self._slot[keys] = slots
        self.uses.map(layers, slots, pages, step)
        self._is_pending[keys] = False
        return keys

    def evict(self, layer: Ints | int, want_free: Ints | int, before_step: int) -> int:
        """Unmap the coldest pages until ``want_free`` slots of each ``layer`` (distinct) are free.

        Only pages last selected before ``before_step`` go. Returns how many went.
        """
        short = np.zeros(self.num_layers, np.int64)
        short[layer] = want_free - self._num_free[layer]
        if (short <= 0).all():
            return 0
        any_heat = np.full(self.num_layers, np.inf, np.float32)
        layers, slots, _ = self.uses.coldest(short, before_step, any_heat)
        self._unmap(layers, slots)
        return len(slots)

    def _unmap(self, layers: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        self._note(self._vacate(layers, slots))

    def _vacate(
        self, layers: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        keys = layers * self.num_pages + self.page_of[layers, slots]
        self._slot[keys] = -1
        self._give_back(layers, slots)
        return keys

    def invalidate(self, pages: Ints) -> None:
        """``pages`` were freed or will be overwritten: drop them in every layer."""
        ids = np.unique(pages).astype(np.int64)
        self._generation[ids] += 1
        self._pending[:, ids] = False
        slots = self.slot_of[:, ids]
        layers, which = np.nonzero(slots >= 0)
        self._give_back(layers, slots[layers, which])
        keys = layers * self.num_pages + ids[which]
        self._slot[keys] = -1
        self._note(keys)
        self.uses.forget(ids)

    def clear(self) -> None:
        """Drop every page (cache flush)."""
        self.invalidate(np.arange(self.num_pages))

    def _give_back(self, layers: npt.NDArray[np.int64], slots: Ints) -> None:
        """``layers`` ascending."""
        self._free[layers, self._num_free[layers] + rank_within(layers)] = slots
        self._num_free += np.bincount(layers, minlength=self.num_layers)
        self.uses.unmap(layers, slots, _FREE)

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
