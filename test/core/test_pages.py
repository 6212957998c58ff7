"""The residency books: a state machine over everything that can happen to a page."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_scout.core.pages import ResidencyTable

LAYERS, PAGES, SLOTS = 2, 12, 5
layer_ids = st.integers(0, LAYERS - 1)
page_sets = st.lists(st.integers(-1, PAGES - 1), max_size=6).map(lambda p: np.array(p, np.int64))


class Residency(RuleBasedStateMachine):
    """Drives the table beside a model that remembers which content each slot was filled with."""

    def __init__(self):
        super().__init__()
        self.table = ResidencyTable(LAYERS, PAGES, SLOTS)
        self.step = 0
        self.content = np.zeros(PAGES, np.int64)  # version of each page's bytes
        self.in_flight = []
        self.slot_content = {}  # (layer, slot) -> (page, version) copied into it

    @rule(layer=layer_ids, pages=page_sets)
    def start_copy(self, layer, pages):
        before = self.table.missing(layer, pages)
        free = self.table.num_free(layer)
        taken = self.table.reserve(layer, pages)
        assert len(taken.pages) == min(len(before), free)
        assert set(taken.pages) <= set(before)
        versions = self.content[taken.pages].copy()
        self.in_flight.append((taken, versions))

    @rule(index=st.integers(0, 9))
    def land(self, index):
        if not self.in_flight:
            return
        taken, versions = self.in_flight.pop(index % len(self.in_flight))
        for page, slot, version in zip(taken.pages, taken.slots, versions, strict=True):
            self.slot_content[(taken.layer, int(slot))] = (int(page), int(version))
        self.table.commit(taken, self.step)

    @rule(layer=layer_ids, pages=page_sets)
    def select(self, layer, pages):
        self.step += 1
        self.table.touch(layer, pages, self.step)

    @rule(pages=page_sets)
    def select_everywhere(self, pages):
        self.step += 1
        self.table.touch_all_layers(pages, self.step)
        for layer in range(LAYERS):
            slots = self.table.slot_of[layer, pages[pages >= 0]]
            assert (self.table.stamp[layer, slots[slots >= 0]] == self.step).all()

    @rule(layer=layer_ids, want=st.integers(0, SLOTS), age=st.integers(0, 3))
    def evict(self, layer, want, age):
        stamps = self.table.stamp[layer].copy()
        mapped = self.table.page_of[layer] >= 0
        gone = self.table.evict(layer, want, self.step - age)
        left = self.table.page_of[layer] >= 0
        lost = mapped & ~left
        assert lost.sum() == gone
        assert (stamps[lost] < self.step - age).all()
        if gone and (left & (stamps >= 0)).any():
            kept = stamps[left & (stamps < self.step - age)]
            assert not len(kept) or stamps[lost].max() <= kept.min(), "a newer page went first"

    @rule(pages=page_sets)
    def free(self, pages):
        pages = pages[pages >= 0]
        self.content[pages] += 1
        self.table.invalidate(pages)
        assert (self.table.slot_of[:, pages] < 0).all()

    @rule()
    def flush(self):
        self.content += 1
        self.table.clear()
        assert self.table.resident_pages == 0

    @invariant()
    def books_agree(self):
        self.table.check()

    @invariant()
    def slots_show_current_bytes(self):
        for layer in range(LAYERS):
            for page in np.flatnonzero(self.table.slot_of[layer] >= 0):
                slot = int(self.table.slot_of[layer, page])
                assert self.slot_content[(layer, slot)] == (page, self.content[page])

    def teardown(self):
        while self.in_flight:
            self.land(0)
        self.table.clear()
        assert all(self.table.num_free(layer) == SLOTS for layer in range(LAYERS))


TestResidency = Residency.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_empty_tables_are_refused():
    import pytest

    with pytest.raises(ValueError, match="num_slots=0"):
        ResidencyTable(1, 1, 0)
