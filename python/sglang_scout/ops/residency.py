"""Which (layer, page) lies in which device slot, and how much each has been of use.

Residency is a property of a (layer, page), not of a request: a page that two requests share through
the radix cache is resident once. The table is only metadata; ``engine/`` moves the bytes.

States of a slot: free, reserved (a copy into it is under way) or mapped to one page. A page that is
freed or overwritten gets a new *generation*: copies that were started for the old content are then
refused at commit, so a slot never shows another request's page.

All methods take many layers at once, for the host has no time for one after the other between two
steps of a device: ``layer`` is a number, or an array that broadcasts with ``pages``. Layers do not
affect each other. Within, a (layer, page) is its index in the flattened tables, its *key*. What a step
changes is C++ (``sgl-kernel/src/residency.h``), the rest numpy on the same memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_scout import _native
from sglang_scout.core.ranking import distinct, rank_within
from sglang_scout.ops.page_uses import PageUses

Ints = npt.NDArray[np.integer]
Ids = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

DEFAULT_HALF_LIFE_STEPS = 8.0
SWAP_MARGIN = 1.5
"""How many times as frequent as another a page must be to take its slot. Without a margin two pages
of equal use change places for ever; measured, it halves the copies for the same misses."""


class Reservation(NamedTuple):
    """Slots taken for copies: ``pages[i]`` of ``layers[i]`` goes to ``slots[i]`` of that layer.

    Ordered by layer, then page.
    """

    layers: Ids
    pages: Ids
    slots: Ids
    generations: Ids

    def per_layer(self, num_layers: int) -> Ids:
        """``[L]`` int64, pages of each layer."""
        return np.bincount(self.layers, minlength=num_layers)


class ResidencyTable:
    """Metadata of the device's page slots, for all layers.

    Args:
        num_layers: L.
        num_pages: P, host pages including the padding page 0.
        num_slots: S, slots per layer.
        half_life_steps: steps after which a selection counts half.

    Attributes:
        uses: how much pages have been selected; the engine says it what was.
        slot_of: ``[L, P]`` int32, slot of a page or -1. Shared with the engine, which reads it.
        page_of: ``[L, S]`` int32, page of a slot; negative: has none.
        num_free: ``[L]`` slots that are neither mapped nor reserved.
        held_back: free slots of each layer that only pages take which must be resident.
        pin_share: share of each layer's slots whose pages, the most frequent, give way to no others than those.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        half_life_steps: float = DEFAULT_HALF_LIFE_STEPS,
    ) -> None:
        if min(num_layers, num_pages, num_slots) <= 0:
            raise ValueError(f"a table of nothing: {num_layers=} {num_pages=} {num_slots=}")
        self.num_layers, self.num_pages, self.num_slots = num_layers, num_pages, num_slots
        self.metadata = metadata = _native.Residency(num_layers, num_pages, num_slots)
        self.uses = PageUses(metadata, half_life_steps)
        self.slot_of, self.page_of = metadata.slot_of, metadata.page_of
        self._slot, self.num_free = self.slot_of.reshape(-1), metadata.num_free
        self.held_back, self.pin_share = 0, 0.0
        self._changed: list[Ids] | None = None

    def take_changes(self) -> tuple[Ids, Pages]:
        """What :attr:`slot_of` has changed since the last call, for a copy of it elsewhere.

        The first call returns nothing and begins to record.

        Returns:
            ``[n]`` distinct indices into the flattened table, and ``[n]`` what stands there now.
        """
        changed = distinct(np.concatenate(self._changed or [np.zeros(0, np.int64)]))
        self._changed = []
        return changed, self._slot[changed]

    def _note(self, changed: Ids) -> int:
        if self._changed is not None:
            self._changed.append(changed)
        return len(changed)

    @property
    def num_spare(self) -> Ids:
        """``[L]`` free slots that are not held back."""
        return np.maximum(self.num_free - self.held_back, 0)

    @property
    def resident_pages_by_layer(self) -> Ids:
        """``[L]`` mapped pages."""
        return (self.page_of >= 0).sum(1)

    @property
    def copying_pages_by_layer(self) -> Ids:
        """``[L]`` pages that are on their way."""
        return self.metadata.is_pending.sum(1)

    @property
    def resident_pages(self) -> int:
        """Mapped (layer, page) pairs over all layers."""
        return int(self.resident_pages_by_layer.sum())

    def missing(self, layer: Ints | int, pages: Ints) -> Ids:
        """The distinct keys of ``pages`` that are neither resident nor on their way, ascending."""
        keys = (np.multiply(layer, self.num_pages) + pages)[pages >= 0]
        return self.metadata.absent(keys.astype(np.int64, copy=False))

    def still_missing(self, missing: Pages) -> Pages:
        """``missing`` [L, B, k], -1 padded, with -1 also for what is resident by now or on its way."""
        found = missing.flatten()  # a copy
        at = np.flatnonzero(found >= 0)
        keys = at // max(missing[0].size, 1) * self.num_pages + found[at]
        is_there = (self._slot[keys] >= 0) | self.metadata.is_pending.reshape(-1)[keys]
        found[at[is_there]] = -1
        return found.reshape(missing.shape)

    def touch_all_layers(self, pages: Ints, step: int) -> int:
        """Protect ``pages`` in ``step``, in every layer; says nothing about their frequency.

        Returns:
            How many of them are not resident, over all layers.
        """
        ids = pages[pages >= 0].astype(np.int64)
        return self.metadata.protect(ids, self.uses.stamp_of(step))

    def are_resident(self, pages: Ints) -> bool:
        """Whether all of ``pages`` ``[n]`` are, in every layer."""
        return bool((np.take(self.slot_of, pages, axis=1) >= 0).all())

    def reserve(self, layer: Ints | int, pages: Ints, is_forced: bool = True) -> Reservation:
        """Take free slots for those of ``pages`` that are missing, the most frequent as far as they go.

        Args:
            is_forced: they must be resident, and take slots that are held back too.
        """
        keys, free = self.missing(layer, pages), self.num_free if is_forced else self.num_spare
        if (self._per_layer(keys) > free).any():
            keys, layers, rank = self._by_frequency(keys)
            keys = np.sort(keys[rank < free[layers]])
        return Reservation(*self.metadata.reserve(keys))

    def exchange(self, layer: Ints | int, pages: Ints, before_step: int) -> Reservation:
        """As :meth:`reserve`; when spare slots end, clearly less frequent pages give theirs.

        Only pages last selected before ``before_step`` that are not pinned go, each for one that is
        ``SWAP_MARGIN`` times as frequent; before that, what lacks of the slots to hold back is freed. The caller
        must be done with reading the layer's slots in this step.
        """
        if self.held_back:
            self.evict(
                np.flatnonzero(np.bincount(np.ravel(layer))), self.held_back, before_step, False
            )
        keys, spare = self.missing(layer, pages), self.num_spare
        short = self._per_layer(keys) - spare
        if (short > 0).any():
            keys, layers, rank = self._by_frequency(keys)
            frequency = self._frequency_of(keys)
            best = np.zeros(self.num_layers, np.float32)  # of the first to find no spare slot
            is_best = rank == spare[layers]
            best[layers[is_best]] = frequency[is_best]
            below = best * np.float32(1.001 / SWAP_MARGIN)  # a little more than needed: rounding
            below = np.minimum(below, self._unpinned_below())
            found_layers, slots, slot_frequency = self.metadata.least_frequent(
                short, self.uses.stamp_of(before_step), below
            )
            # The most frequent page that finds no spare slot meets the least frequent slot.
            contender = np.searchsorted(layers, found_layers) + spare[found_layers]
            contender += rank_within(found_layers)
            # Contenders come by falling frequency and slots by rising one, so the wins come first.
            wins = frequency[contender] > SWAP_MARGIN * slot_frequency
            self._note(self.metadata.vacate(found_layers[wins], slots[wins]))
            spare += np.bincount(found_layers[wins], minlength=self.num_layers)
            keys = np.sort(keys[rank < spare[layers]])
        return Reservation(*self.metadata.reserve(keys))

    def _unpinned_below(self) -> Floats:
        """``[L]`` frequency below which pages are not pinned. Of equal ones at the border none is."""
        pinned = int(self.pin_share * self.num_slots)
        if not pinned:
            return np.full(self.num_layers, np.inf, np.float32)
        frequency = np.where(self.page_of >= 0, self.metadata.slot_frequency, np.float32(-np.inf))
        first_unpinned = np.partition(frequency, -pinned - 1)[:, -pinned - 1]
        below: Floats = np.nextafter(first_unpinned, np.float32(np.inf))
        return below

    def _per_layer(self, keys: Ids) -> Ids:
        return np.bincount(keys // self.num_pages, minlength=self.num_layers)

    def _frequency_of(self, keys: Ids) -> Floats:
        return self.uses.frequency[np.divmod(keys, self.num_pages)]

    def _by_frequency(self, keys: Ids) -> tuple[Ids, Ids, Ids]:
        """Ascending ``keys`` by layer and then falling frequency; layers, and places within them."""
        layers = keys // self.num_pages
        order = np.lexsort((-self._frequency_of(keys), layers))
        return keys[order], layers, rank_within(layers)

    def commit(self, reservation: Reservation, step: int) -> int:
        """The copies have landed: map the pages. Returns how many were still wanted."""
        return self._note(self.metadata.land(*reservation, self.uses.stamp_of(step)))

    def evict(
        self, layer: Ints | int, want_free: Ints | int, before_step: int, is_forced: bool = True
    ) -> int:
        """Unmap the least frequent pages until ``want_free`` slots of each ``layer`` (distinct) are free.

        Only pages last selected before ``before_step`` go; pinned ones if ``is_forced``: then they make room for
        what must be resident. Returns how many went.
        """
        short = np.zeros(self.num_layers, np.int64)
        short[layer] = want_free - self.num_free[layer]
        if (short <= 0).all():
            return 0
        below = (
            np.full(self.num_layers, np.inf, np.float32) if is_forced else self._unpinned_below()
        )
        before = self.uses.stamp_of(before_step)
        layers, slots, _ = self.metadata.least_frequent(short, before, below)
        return self._note(self.metadata.vacate(layers, slots))

    def invalidate(self, pages: Ints) -> None:
        """``pages`` were freed or will be overwritten: drop them in every layer."""
        ids = np.unique(pages).astype(np.int64)
        self.metadata.generation[ids] += 1
        self.metadata.is_pending[:, ids] = False
        slots = self.slot_of[:, ids].astype(np.int64)
        layers = np.nonzero(slots >= 0)[0].copy()  # contiguous
        self._note(self.metadata.vacate(layers, slots[slots >= 0]))
        self.uses.frequency[:, ids] = 0.0
        self.uses.stamp[:, ids] = -1

    def check(self) -> None:
        """Raise AssertionError where slots are lost or doubled, or the two directions of the map disagree."""
        for layer in range(self.num_layers):
            free = self.metadata.free[layer, : self.num_free[layer]]
            states, slot_of = self.page_of[layer], self.slot_of[layer]
            pending = self.metadata.is_pending[layer]
            mapped, reserved = np.flatnonzero(states >= 0), (states < -1).sum()
            is_free = len(np.unique(free)) == len(free) and (states[free] == -1).all()
            assert is_free, f"layer {layer}: a slot is free twice, or free but mapped"
            is_inverse = (slot_of[states[mapped]] == mapped).all()
            assert is_inverse and (slot_of >= 0).sum() == len(mapped), f"layer {layer}: map"
            total = len(free) + len(mapped) + reserved
            assert total == self.num_slots, f"layer {layer}: {total} of {self.num_slots} slots"
            is_apart = not (pending & (slot_of >= 0)).any()
            assert is_apart and pending.sum() <= reserved, f"layer {layer}: pending"
