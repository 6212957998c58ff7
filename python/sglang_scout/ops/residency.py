"""Which (layer, page) is resident in which device slot, and how frequently each is used; ``engine/`` moves the bytes.

A slot is free, reserved (a copy into it is in flight) or mapped to one page. A page that is freed or overwritten gets a
new *generation*: copies of the old content are refused at commit, so a slot never exposes another request's page.

All methods are batched over layers, which are independent: ``layer`` is a number, or an array that broadcasts with
``pages``. A (layer, page) is its index in the flattened tables, its *key*. Per-step updates are C++
(``sgl-kernel/src/residency.h``), the rest numpy on the same memory.

The *decayed frequency* of a (layer, page) grows by one for each list of a request and step that selects it and halves
every ``half_life_steps``; non-resident pages have one too. A page evicts another only if it is clearly more frequent:
with recency alone, a page selected once would evict one selected every other step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_scout import _native

Ints = npt.NDArray[np.integer] | int
Ids = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

HALF_LIFE_STEPS = 8.0
"""Unless a policy remembers uses for longer."""
EXCHANGE_MARGIN = 1.5
"""Factor by which a page must be more frequent than another to evict it: fewer copies for about the same misses."""

# Frequencies are in units that grow with the step, so no page needs to decay. They are scaled down by this power of
# two before they overflow float32; stamps are rebased before steps overflow int32, keeping the latest.
_RESCALE_LOG2 = 64
_LAST_STAMP, _KEPT_STAMPS = 2**30, 2**20


def rank_within(groups: Ids) -> Ids:
    """The index of each element in its group; ``groups`` are sorted, ascending."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def distinct(values: Ints) -> Ids:
    """Like ``np.unique``, which is slower as it hashes before it sorts."""
    ordered = np.sort(values, axis=None).astype(np.int64)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


class PageUses:
    """How often every page of every layer was selected recently.

    Attributes:
        frequency: ``[L, P]`` float32, decayed; only comparisons within one step are meaningful.
        stamp: ``[L, P]`` int32, :meth:`stamp_of` the step in which the page was last selected or landed, -1: never.
            In-flight pages have one too, so one that this step selected is not evicted as it lands.
    """

    def __init__(self, metadata: _native.Residency, half_life_steps: float) -> None:
        self._metadata, self._half_life_steps = metadata, half_life_steps
        self.frequency, self.stamp = metadata.frequency, metadata.stamp
        self._scaled_at_step = self._first_step = 0
        # Steady-state frequency, in selections, of a page that is selected in every step. However long uses are
        # remembered, that is too much for pages of a single step.
        self._steady = 1 / (1 - 2 ** (-1 / min(half_life_steps, HALF_LIFE_STEPS)))

    def stamp_of(self, step: int) -> int:
        return step - self._first_step

    count = staticmethod(_native.count_pages)
    """``[n, B]`` int64, number of pages in each row of ``[n, B, k]`` int32, which is padded with -1."""

    def touch(self, layers: Ids, pages: Pages, step: int, fresh: Flags) -> None:
        """Note that ``pages`` ``[n, B, k]`` of ``layers`` ``[n]``, padded with -1, were selected in ``step``.

        ``fresh`` ``[B]``: rows of requests without history, whose pages start at the steady-state frequency: otherwise
        they could not evict any for many steps.
        """
        weight = np.float32(self._weight(step))
        weights = np.where(fresh, np.float32(weight * self._steady), weight)
        self._metadata.touch(layers, pages, weights, self.stamp_of(step))

    def _weight(self, step: int) -> float:
        """Frequency that one selection in ``step`` adds."""
        grown = (step - self._scaled_at_step) / self._half_life_steps
        if grown > _RESCALE_LOG2:
            self.frequency *= np.float32(2.0 ** -min(grown, 120.0))
            self.frequency[self.frequency < 2.0**-60] = 0.0
            if (passed := self.stamp_of(step) - _KEPT_STAMPS) > _LAST_STAMP:
                self.stamp[:] = np.maximum(self.stamp, passed - 1) - passed
                self._first_step += passed
            every, nothing = np.arange(len(self.stamp)), np.zeros((len(self.stamp), 0, 0), np.int32)
            self._metadata.touch(every, nothing, np.zeros(0, np.float32), 0)  # the per-slot copies
            self._scaled_at_step, grown = step, 0.0
        return float(2.0**grown)

    def selected_since(self, layers: Ids, step: int) -> tuple[Ids, Ids]:
        """Distinct (layer, page) pairs of ``layers`` selected in ``step`` or later, as two arrays."""
        is_recent = self.stamp[layers] >= self.stamp_of(step)
        at, pages = np.nonzero(is_recent & (self.frequency[layers] > 0))
        return layers[at], pages

    def most_frequent(
        self, layers: Ids, missed: Pages, counts: Flags, is_first: Flags, limit_pages: Ids
    ) -> tuple[Ids, Ids]:
        """The ``limit_pages[i]`` pages of ``missed[i]`` ``[n, B, k]``, -1 padded, most worth copying, for each of
        ``layers`` ``[n]``: by ``is_first`` row ``[B]``, then by frequency, then by smaller id, of the rows that
        ``counts`` ``[n, B]``. Distinct (layer, page) pairs as two arrays, in the order of ``layers``, then ascending.
        """
        return self._metadata.most_frequent(layers, missed, counts, is_first, limit_pages)


class Reservation(NamedTuple):
    """Copies of ``pages[i]`` of ``layers[i]`` to ``slots[i]`` of that layer, ordered by layer, then page."""

    layers: Ids
    pages: Ids
    slots: Ids
    generations: Ids

    def per_layer(self, num_layers: int) -> Ids:
        """``[L]`` number of pages of each layer."""
        return np.bincount(self.layers, minlength=num_layers)


class ResidencyTable:
    """Metadata of the device's page slots, for all layers.

    Args:
        num_pages, num_slots: P host pages including the padding page 0, S slots per layer.

    Attributes:
        slot_of: ``[L, P]`` int32, slot of a page or -1.
        page_of: ``[L, S]`` int32, page of a slot; negative: none.
        num_free: ``[L]`` slots that are neither mapped nor reserved.
        held_back: free slots per layer set aside for pages that must be resident.
        pin_share: share of each layer's slots whose pages (the most frequent) yield only to must-be-resident ones.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        half_life_steps: float = HALF_LIFE_STEPS,
    ) -> None:
        if min(num_layers, num_pages, num_slots) <= 0:
            raise ValueError(f"sizes must be above 0: {num_layers=} {num_pages=} {num_slots=}")
        self.num_layers, self.num_pages, self.num_slots = num_layers, num_pages, num_slots
        self.metadata = metadata = _native.Residency(num_layers, num_pages, num_slots)
        self.uses = PageUses(metadata, half_life_steps)
        self.slot_of, self.page_of = metadata.slot_of, metadata.page_of
        self._slot, self.num_free = self.slot_of.reshape(-1), metadata.num_free
        self.held_back, self.pin_share = 0, 0.0
        self._changed: list[Ids] | None = None

    def take_changes(self) -> tuple[Ids, Pages]:
        """Distinct keys whose slot changed since the last call, and their current slots. The first call returns nothing
        and starts recording."""
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
        return (self.page_of >= 0).sum(1)

    @property
    def resident_pages(self) -> int:
        return int(self.resident_pages_by_layer.sum())

    def missing(self, layer: Ints, pages: Ints) -> Ids:
        """The distinct keys of ``pages`` that are neither resident nor in flight, ascending."""
        keys = (np.multiply(layer, self.num_pages) + pages)[pages >= 0]
        return self.metadata.absent(keys.astype(np.int64, copy=False))

    def still_missing(self, missing: Pages) -> Pages:
        """``missing`` [L, B, k], -1 padded, with -1 also for pages that are by now resident or in flight."""
        found = missing.flatten()  # a copy
        at = np.flatnonzero(found >= 0)
        keys = at // max(missing[0].size, 1) * self.num_pages + found[at]
        is_there = (self._slot[keys] >= 0) | self.metadata.is_pending.reshape(-1)[keys]
        found[at[is_there]] = -1
        return found.reshape(missing.shape)

    def touch_all_layers(self, pages: Ints, step: int) -> int:
        """Protect ``pages`` from eviction in ``step`` in every layer, without changing their frequency. Returns how
        many are not resident, over all layers."""
        ids = pages[pages >= 0].astype(np.int64)
        return self.metadata.protect(ids, self.uses.stamp_of(step))

    def are_resident(self, pages: Ints) -> bool:
        """All of them, in every layer."""
        return bool((np.take(self.slot_of, pages, axis=1) >= 0).all())

    def reserve(self, layer: Ints, pages: Ints, is_forced: bool = True) -> Reservation:
        """Reserve free slots for the missing ones of ``pages``, most frequent first, while there are slots: also those
        held back if ``is_forced``."""
        keys, free = self.missing(layer, pages), self.num_free if is_forced else self.num_spare
        if (self._per_layer(keys) > free).any():
            keys, layers, rank, _ = self._by_frequency(keys)
            keys = np.sort(keys[rank < free[layers]])
        return Reservation(*self.metadata.reserve(keys))

    def exchange(self, layer: Ints, pages: Ints, before_step: int) -> Reservation:
        """Like :meth:`reserve`, but once spare slots run out, unpinned pages last selected before ``before_step`` are
        evicted, each for one ``EXCHANGE_MARGIN`` times as frequent; first, the slots to hold back are replenished. The
        layer's slots must have been read in this step."""
        if self.held_back:
            self.evict(distinct(layer), self.held_back, before_step, is_forced=False)
        keys, spare = self.missing(layer, pages), self.num_spare
        short = self._per_layer(keys) - spare
        if (short > 0).any():
            keys, layers, rank, frequency = self._by_frequency(keys)
            best = np.zeros(self.num_layers, np.float32)  # of the first page without a spare slot
            is_best = rank == spare[layers]
            best[layers[is_best]] = frequency[is_best]
            below = best * np.float32(1.001 / EXCHANGE_MARGIN)  # with slack for rounding
            below = np.minimum(below, self._evictable_below(is_forced=False))
            before = self.uses.stamp_of(before_step)
            found_layers, slots, slot_frequency = self.metadata.least_frequent(short, before, below)
            # Pair the most frequent page without a spare slot with the least frequent slot, and so on.
            contender = np.searchsorted(layers, found_layers) + spare[found_layers]
            contender += rank_within(found_layers)
            # Contenders are in descending and slots in ascending order of frequency, so wins come first.
            wins = frequency[contender] > EXCHANGE_MARGIN * slot_frequency
            self._note(self.metadata.vacate(found_layers[wins], slots[wins]))
            spare += np.bincount(found_layers[wins], minlength=self.num_layers)
            keys = np.sort(keys[rank < spare[layers]])
        return Reservation(*self.metadata.reserve(keys))

    def _evictable_below(self, is_forced: bool) -> Floats:
        """``[L]`` frequency below which pages are not pinned, ties at the threshold are not; any if ``is_forced``."""
        pinned = int(self.pin_share * self.num_slots)
        if is_forced or not pinned:
            return np.full(self.num_layers, np.inf, np.float32)
        frequency = np.where(self.page_of >= 0, self.metadata.slot_frequency, np.float32(-np.inf))
        first_unpinned = np.partition(frequency, -pinned - 1)[:, -pinned - 1]
        return np.nextafter(first_unpinned, np.float32(np.inf))

    def _per_layer(self, keys: Ids) -> Ids:
        return np.bincount(keys // self.num_pages, minlength=self.num_layers)

    def _by_frequency(self, keys: Ids) -> tuple[Ids, Ids, Ids, Floats]:
        """Ascending ``keys`` sorted by layer, then descending frequency; their layers, ranks within them, frequency."""
        layers, pages = np.divmod(keys, self.num_pages)
        frequency = self.uses.frequency[layers, pages]
        order = np.lexsort((-frequency, layers))
        return keys[order], layers, rank_within(layers), frequency[order]

    def commit(self, reservation: Reservation, step: int) -> int:
        """Map the pages after their copies have landed. Returns how many were still valid."""
        return self._note(self.metadata.land(*reservation, self.uses.stamp_of(step)))

    def evict(self, layer: Ints, want_free: Ints, before_step: int, is_forced: bool = True) -> int:
        """Unmap the least frequent pages until ``want_free`` slots of each ``layer`` (distinct) are free. Only pages
        last selected before ``before_step`` are evicted, pinned ones only if ``is_forced``. Returns how many."""
        short = np.zeros(self.num_layers, np.int64)
        short[layer] = want_free - self.num_free[layer]
        if (short <= 0).all():
            return 0
        before, below = self.uses.stamp_of(before_step), self._evictable_below(is_forced)
        layers, slots, _ = self.metadata.least_frequent(short, before, below)
        return self._note(self.metadata.vacate(layers, slots))

    def invalidate(self, pages: Ints) -> None:
        """``pages`` were freed or will be overwritten: drop them in every layer."""
        ids = distinct(pages)
        self.metadata.generation[ids] += 1
        self.metadata.is_pending[:, ids] = False
        slots = self.slot_of[:, ids].astype(np.int64)
        layers = np.nonzero(slots >= 0)[0].copy()  # contiguous
        self._note(self.metadata.vacate(layers, slots[slots >= 0]))
        self.uses.frequency[:, ids] = 0.0
        self.uses.stamp[:, ids] = -1
