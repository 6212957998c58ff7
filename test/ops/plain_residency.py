"""The oracle of `ops.residency` in plain Python, one page and slot at a time."""

import math

import numpy as np

from sglang_scout.ops.residency import EXCHANGE_MARGIN

FREE, RESERVED = -1, -2


class PlainResidency:
    """``ResidencyTable`` and its ``uses`` in one; reservations are lists of (layer, page, slot, generation)."""

    def __init__(self, layers, pages, slots, half_life_steps):
        self.every, self.num_slots = range(layers), slots
        self.half_life_steps, self.scaled_at = half_life_steps, 0
        self.frequency = np.zeros((layers, pages), np.float32)
        self.stamp = np.full((layers, pages), -1, np.int32)
        self.slot_of = np.full((layers, pages), -1, np.int32)
        self.page_of = np.full((layers, slots), FREE, np.int32)
        self.is_pending = np.zeros((layers, pages), bool)
        self.generation = [0] * pages
        self.free = [list(range(slots)) for _ in self.every]
        self.held_back, self.pin_share = 0, 0.0

    def touch(self, layers, pages, step, fresh):
        grown = (step - self.scaled_at) / self.half_life_steps
        if grown > 64:
            self.frequency *= np.float32(2.0 ** -min(grown, 120.0))
            self.frequency[self.frequency < 2.0**-60] = 0.0
            self.scaled_at, grown = step, 0.0
        weight = np.float32(2.0**grown)
        heavy = np.float32(weight * (1 / (1 - 2 ** (-1 / min(self.half_life_steps, 8.0)))))
        for layer, rows in zip(layers, pages, strict=True):
            for row, is_fresh in zip(rows, fresh, strict=True):
                for page in row[row >= 0]:
                    self.frequency[layer, page] += heavy if is_fresh else weight
                    self.stamp[layer, page] = step

    def touch_all_layers(self, pages, step):
        pages = pages[pages >= 0]
        self.stamp[:, pages] = step
        return int((self.slot_of[:, pages] < 0).sum())

    def _missing(self, layer, pages):
        here = sorted({int(page) for page in pages.flat if page >= 0})
        return [p for p in here if self.slot_of[layer, p] < 0 and not self.is_pending[layer, p]]

    def pinned(self, layer):
        """The most frequent pages, at most the share; of ties at the threshold none."""
        count = int(self.pin_share * self.num_slots)
        pages = [int(page) for page in self.page_of[layer] if page >= 0]
        others = sorted((self.frequency[layer, page] for page in pages), reverse=True)[count:]
        is_pinned = {
            page for page in pages if not others or self.frequency[layer, page] > others[0]
        }
        return is_pinned if count else set()

    def _least_frequent(self, layer, before_step, is_forced, below=math.inf):
        """[(frequency, stamp, slot)] of eviction candidates, in eviction order."""
        found, pinned = [], set() if is_forced else self.pinned(layer)
        for slot, page in enumerate(self.page_of[layer]):
            if page >= 0 and page not in pinned:
                frequency, stamp = self.frequency[layer, page], self.stamp[layer, page]
                if stamp < before_step and frequency < below:
                    found.append((frequency, stamp, slot))
        return sorted(found)

    def _vacate(self, layer, slot):
        self.slot_of[layer, self.page_of[layer, slot]] = -1
        self._give_back(layer, slot)

    def _give_back(self, layer, slot):
        self.page_of[layer, slot] = FREE
        self.free[layer].append(slot)

    def exchange(self, pages, before_step, is_forced=False):
        """``pages`` [L, ...] of every layer; before_step None: only free slots are used."""
        taken = []
        for layer in self.every:
            if before_step is not None and len(pages[layer]):
                self._evict(layer, self.held_back, before_step, False)
            missing = self._missing(layer, pages[layer])
            order = sorted(missing, key=lambda page: (-self.frequency[layer, page], page))
            free = max(len(self.free[layer]) - (0 if is_forced else self.held_back), 0)
            if before_step is not None and len(missing) > free:
                below = self.frequency[layer, order[free]] * np.float32(1.001 / EXCHANGE_MARGIN)
                found = self._least_frequent(layer, before_step, False, below)
                for page, (frequency, _, slot) in zip(order[free:], found, strict=False):
                    if self.frequency[layer, page] > EXCHANGE_MARGIN * frequency:
                        self._vacate(layer, slot)
                        free += 1
            chosen = sorted(order[:free])
            slots = self.free[layer][len(self.free[layer]) - len(chosen) :]
            del self.free[layer][len(self.free[layer]) - len(chosen) :]
            for page, slot in zip(chosen, slots, strict=True):
                self.page_of[layer, slot] = RESERVED
                self.is_pending[layer, page] = True
                taken.append((layer, page, slot, self.generation[page]))
        return taken

    def commit(self, taken, step):
        wanted = 0
        for layer, page, slot, generation in taken:
            if generation != self.generation[page]:
                self._give_back(layer, slot)
                continue
            self.slot_of[layer, page], self.page_of[layer, slot] = slot, page
            self.stamp[layer, page] = max(self.stamp[layer, page], step)
            self.is_pending[layer, page] = False
            wanted += 1
        return wanted

    def evict(self, want_free, before_step, is_forced=True):
        return sum(
            self._evict(layer, want_free[layer], before_step, is_forced) for layer in self.every
        )

    def _evict(self, layer, want_free, before_step, is_forced):
        short = max(want_free - len(self.free[layer]), 0)
        gone = self._least_frequent(layer, before_step, is_forced)[:short]
        for _, _, slot in gone:
            self._vacate(layer, slot)
        return len(gone)

    def invalidate(self, pages):
        for page in sorted(set(pages.tolist())):
            self.generation[page] += 1
        for layer in self.every:
            for page in sorted(set(pages.tolist())):
                self.is_pending[layer, page] = False
                self.frequency[layer, page], self.stamp[layer, page] = 0.0, -1
                if self.slot_of[layer, page] >= 0:
                    self._vacate(layer, self.slot_of[layer, page])
