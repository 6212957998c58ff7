"""Everything that can happen to a page, in any order, against a simple model of what must hold.

The model has requests that own pages, bytes that change with each owner, and copies that read the
bytes when they run, which may be before or after the page has changed hands.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang_scout.core.pages import SWAP_MARGIN, ResidencyTable
from sglang_scout.core.uses import PageUses
from sglang_scout.ops.native_slots import NativeResidencyTable
from sglang_scout.ops.native_uses import NativePageUses

LAYERS, PAGES, SLOTS = 2, 14, 3
layer_ids = st.integers(0, LAYERS - 1)
some_layers = st.sets(layer_ids, min_size=1).map(sorted)  # that one call takes together
choices = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=5)


class ResidencyMachine(RuleBasedStateMachine):
    requests = Bundle("requests")
    make_uses, make_table = PageUses, ResidencyTable

    @initialize(target=requests, half_life_steps=st.sampled_from([0.5, 2.0, 8.0]))
    def start(self, half_life_steps):
        self.table = self.make_table(self.make_uses(LAYERS, PAGES, SLOTS, half_life_steps))
        self.half_life_steps = half_life_steps
        self.table.take_changes()
        self.slots_elsewhere = self.table.slot_of.copy()  # kept by what changed alone
        self.step = 1
        self.next_request = 1
        self.free_pages = list(range(1, PAGES))
        self.owner = {}  # page -> the request whose bytes it holds
        self.selections = {}  # (layer, page) -> steps of the selections of its present owner
        self.selected_now = set()  # (layer, page) of this step
        self.in_flight = []  # [reservation, bytes as read by the copy or None while it waits]
        self.bytes_in_slot = {}  # (layer, slot) -> (page, owner) as copied
        return self.admit(6)  # more pages than slots

    # Requests

    @rule(target=requests, count=st.integers(1, 4))
    def admit(self, count):
        request = self.next_request
        self.next_request += 1
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        for page in pages:
            self.owner[page] = request
        return request, pages

    @rule(request=consumes(requests))
    def finish_or_abort(self, request):
        """The same for the table: with copies under way it is an abort."""
        number, pages = request
        pages = [page for page in pages if self.owner.get(page) == number]  # none after a clear
        self._drop(pages)
        self.table.invalidate(np.array(pages, np.int64))
        assert not len(pages) or (self.table.slot_of[:, pages] < 0).all()

    @precondition(lambda self: self.step % 7 == 0)  # rare, or there is never much to lose
    @rule()
    def clear(self):
        self._drop(range(PAGES))
        self.table.clear()
        assert self.table.resident_pages == 0

    def _drop(self, pages):
        for page in pages:
            if self.owner.pop(page, None) is not None:
                self.free_pages.append(page)
            for layer in range(LAYERS):
                self.selections.pop((layer, page), None)
                self.selected_now.discard((layer, page))

    # A step

    @rule()
    def next_step(self):
        self.step += 1
        self.selected_now.clear()

    @rule(layer=layer_ids, chosen=choices, is_fresh=st.booleans())
    def select(self, layer, chosen, is_fresh):
        pages = self._owned(chosen)[None, :]
        self.table.uses.touch(
            np.array([layer]), pages[None].astype(np.int32), self.step, np.array([is_fresh])
        )
        for page in pages[pages >= 0].tolist():
            self.selected_now.add((layer, page))
            weight = 1 / (1 - 2 ** (-1 / self.half_life_steps)) if is_fresh else 1.0
            self.selections.setdefault((layer, page), []).append((self.step, weight))

    @rule(layers=some_layers, chosen=choices)
    def recall(self, layers, chosen):
        """As a policy that copies ahead does: free slots only."""
        pages = self._owned(chosen)
        before = {layer: self._missing(layer, pages) for layer in layers}
        free = {layer: self.table.num_free(layer) for layer in layers}
        resident = {layer: self._resident(layer) for layer in layers}
        taken = self.table.reserve(np.array(layers)[:, None], np.tile(pages, (len(layers), 1)))
        for layer in layers:
            count = int((taken.layers == layer).sum())
            assert count == min(len(before[layer]), free[layer])
            assert self._resident(layer) == resident[layer]
        self._begin(taken, before)

    @rule(layers=some_layers, chosen=choices)
    def exchange(self, layers, chosen):
        pages = self._owned(chosen)
        before = {layer: self._missing(layer, pages) for layer in layers}
        free = {layer: self.table.num_free(layer) for layer in layers}
        resident = {layer: self._resident(layer) for layer in layers}
        taken = self.table.exchange(
            np.array(layers)[:, None], np.tile(pages, (len(layers), 1)), self.step
        )
        for layer in layers:
            winners = taken.pages[taken.layers == layer]
            gone = resident[layer] - self._resident(layer)
            assert not self._resident(layer) - resident[layer], "readable before it has landed"
            assert len(winners) == min(len(before[layer]), free[layer]) + len(gone)
            for page in gone:
                assert (layer, page) not in self.selected_now, "in use in this very step"
                hottest_loser = self._heat(layer, page)
                assert any(self._heat(layer, int(p)) > hottest_loser for p in winners)
            if gone:
                coldest_winner = sorted(self._heat(layer, int(p)) for p in winners)
                losers = sorted(self._heat(layer, p) for p in gone)
                assert coldest_winner[-1] > SWAP_MARGIN * losers[0] * 0.999
        self._begin(taken, before)

    @rule(layer=layer_ids, chosen=choices, is_fresh=st.booleans(), in_time=st.booleans())
    def attend(self, layer, chosen, is_fresh, in_time):
        """A layer of a step as the engine runs it: select, then recall what was missing."""
        self.next_step()
        self.select(layer, chosen, is_fresh)
        self.exchange([layer], chosen)
        if in_time:
            self.commit(len(self.in_flight) - 1)

    def _begin(self, taken, before):
        for layer, page, slot in self._entries(taken):
            assert page in before[layer]
            self.bytes_in_slot.pop((layer, slot), None)
        assert len({(layer, slot) for layer, _, slot in self._entries(taken)}) == len(taken.slots)
        self.in_flight.append([taken, None])

    def _entries(self, taken):
        return list(
            zip(taken.layers.tolist(), taken.pages.tolist(), taken.slots.tolist(), strict=True)
        )

    def _missing(self, layer, pages):
        found = self.table.missing(layer, pages) - layer * PAGES
        return set(found.tolist())

    @precondition(lambda self: self.in_flight)
    @rule(index=st.integers(0, 9))
    def copy_runs(self, index):
        """The copy reads whoever's bytes are there now."""
        copy = self.in_flight[index % len(self.in_flight)]
        if copy[1] is None:
            copy[1] = [self.owner.get(int(page)) for page in copy[0].pages]

    @precondition(lambda self: self.in_flight)
    @rule(index=st.integers(0, 9))
    def commit(self, index):
        """Copies land in any order: late ones too, at whatever boundary finds them done."""
        index %= len(self.in_flight)
        self.copy_runs(index)
        taken, owners = self.in_flight.pop(index)
        for (layer, page, slot), owner in zip(self._entries(taken), owners, strict=True):
            self.bytes_in_slot[(layer, slot)] = (page, owner)
        free = sum(self.table.num_free(layer) for layer in range(LAYERS))
        wanted = self.table.commit(taken, self.step - 1)
        now_free = sum(self.table.num_free(layer) for layer in range(LAYERS))
        assert now_free == free + len(taken.pages) - wanted

    @rule(
        layers=some_layers,
        want=st.lists(st.integers(0, SLOTS + 1), min_size=LAYERS, max_size=LAYERS),
        age=st.integers(0, 2),
    )
    def evict(self, layers, want, age):
        before_step = self.step - age
        want = want[: len(layers)]
        resident = [self._resident(layer) for layer in layers]
        free = [self.table.num_free(layer) for layer in layers]
        stamps = [
            {p: self.table.uses.stamp[layer, p] for p in self._resident(layer)} for layer in layers
        ]
        gone_count = self.table.evict(np.array(layers), np.array(want), before_step)
        gone = sum(
            self._gone_of_layer(*about, before_step)
            for about in zip(layers, want, resident, free, stamps, strict=True)
        )
        assert gone == gone_count

    def _gone_of_layer(self, layer, want, resident, free, stamps, before_step):
        gone = resident - self._resident(layer)
        may_go = {p for p in resident if stamps[p] < before_step}
        assert gone <= may_go
        assert len(gone) == min(max(want - free, 0), len(may_go))
        stay = may_go - gone
        if gone and stay:
            hottest = max(self._heat(layer, p) for p in gone)
            assert hottest <= min(self._heat(layer, p) for p in stay) * 1.001 + 1e-9
        return len(gone)

    # What must always hold

    @invariant()
    def slots_are_conserved(self):
        if not hasattr(self, "table"):
            return
        self.table.check()
        for layer in range(LAYERS):
            reserved = sum(int((t.layers == layer).sum()) for t, _ in self.in_flight)
            mapped = len(self._resident(layer))
            assert self.table.num_free(layer) + mapped + reserved == SLOTS

    @invariant()
    def what_changed_keeps_a_copy_true(self):
        if not hasattr(self, "table"):
            return
        changed, slots = self.table.take_changes()
        assert len(np.unique(changed)) == len(changed)
        self.slots_elsewhere.reshape(-1)[changed] = slots
        assert np.array_equal(self.slots_elsewhere, self.table.slot_of)

    @invariant()
    def no_page_is_in_two_places(self):
        if not hasattr(self, "table"):
            return
        for layer in range(LAYERS):
            pages = self._resident(layer)
            slots = [int(self.table.slot_of[layer, p]) for p in pages]
            assert len(set(slots)) == len(slots)
            reserved = {
                s for t, _ in self.in_flight for at, _, s in self._entries(t) if at == layer
            }
            assert not reserved & set(slots), "a slot is read and written at once"

    @invariant()
    def only_the_present_owner_s_bytes_are_readable(self):
        if not hasattr(self, "table"):
            return
        for layer in range(LAYERS):
            for page in self._resident(layer):
                slot = int(self.table.slot_of[layer, page])
                assert page in self.owner, "a page without a request is resident"
                assert self.bytes_in_slot[(layer, slot)] == (page, self.owner[page])

    def teardown(self):
        if not hasattr(self, "table"):
            return
        while self.in_flight:
            self.commit(0)
        self.table.clear()
        assert all(self.table.num_free(layer) == SLOTS for layer in range(LAYERS))

    def _owned(self, chosen):
        """Pages of requests, so that few choices are in vain, and -1 for padding."""
        owned = sorted(self.owner)
        return np.array([owned[i % len(owned)] if i and owned else -1 for i in chosen], np.int64)

    def _resident(self, layer):
        return set(np.flatnonzero(self.table.slot_of[layer] >= 0).tolist())

    def _heat(self, layer, page):
        """The definition: a selection counts half after each half-life."""
        return sum(
            weight * 2 ** ((step - self.step) / self.half_life_steps)
            for step, weight in self.selections.get((layer, page), [])
        )


class NativeMachine(ResidencyMachine):
    make_uses, make_table = NativePageUses, NativeResidencyTable


TestResidencyMachine = ResidencyMachine.TestCase
TestNativeMachine = NativeMachine.TestCase
TestResidencyMachine.settings = TestNativeMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
