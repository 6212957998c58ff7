"""The residency table's changes in C++ against those in numpy: the same books after every history."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.pages import Reservation, ResidencyTable
from sglang_scout.core.uses import PageUses
from sglang_scout.ops.native_slots import NativeResidencyTable

LAYERS, PAGES = 3, 40
EVERY = np.arange(LAYERS)


def books(table):
    uses = table.uses
    yield from (uses.both, uses.page_of, uses.slot_stamp * (uses.page_of >= 0), uses.slot_heat)
    yield from (table.slot_of, table._pending, table._generation, table._num_free)
    yield from (free[:n] for free, n in zip(table._free, table._num_free, strict=True))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def parts(reservation):
    r = reservation
    return r.layers, r.pages, r.slots, r.generations


@pytest.mark.parametrize("slots", [1, 7, 60])
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_books_whatever_happens(slots, seed):
    rng = np.random.default_rng(seed)
    both = [
        kind(PageUses(LAYERS, PAGES, slots, 2.0)) for kind in (NativeResidencyTable, ResidencyTable)
    ]
    for table in both:
        table.take_changes()
    in_flight = []
    for step in range(1, 30):
        chosen = rng.integers(-1, PAGES, (LAYERS, 2, 5), np.int32) // np.int32(rng.choice([1, 4]))
        fresh = rng.random(2) < 0.2
        what, before = rng.integers(6), step - int(rng.integers(0, 2))
        short = rng.integers(-1, 4, LAYERS)
        gone = rng.integers(0, PAGES, rng.integers(1, 9))
        is_landing = what == 0 and len(in_flight) > 0
        pair = in_flight.pop(rng.integers(len(in_flight))) if is_landing else ()
        found = []
        for i, table in enumerate(both):
            if is_landing:
                found.append((np.array(table.commit(pair[i], step - 1)),))
            elif what == 1:
                found.append((np.array(table.evict(EVERY, short, before)),))
            elif what == 2:
                table.invalidate(gone)
                found.append(())
            elif what == 3:
                table.uses.touch(EVERY, chosen, step, fresh)
                found.append(())
            elif what == 4:
                found.append(table.exchange(EVERY[:, None, None], chosen, before))
            else:
                found.append(table.reserve(EVERY[:, None, None], chosen))
        if isinstance(found[0], Reservation):
            in_flight.append(found)
            found = [parts(r) for r in found]
        assert same(*found)
        assert same(*map(books, both))
        if rng.random() < 0.5:
            assert same(*(table.take_changes() for table in both))
        for table in both:
            table.check()


def test_what_is_out_of_range_is_refused_before_anything_is_written():
    table = NativeResidencyTable(PageUses(2, 9, 4))
    slots, ids = table._books, lambda *values: np.array(values, np.int64)
    before = [a.copy() for a in books(table)]
    for bad in (-1, 18):
        with pytest.raises(ValueError, match="out of range"):
            slots.absent(ids(3, bad))
        with pytest.raises(ValueError, match="out of range"):
            slots.reserve(ids(3, bad))
    for layers, pages, of_layer in (([0, 2], [1, 1], [0, 0]), ([0, 0], [1, 9], [0, 1]),
                                    ([0, 1], [1, 1], [0, 4]), ([0, -1], [1, 1], [0, 0])):  # fmt: skip
        with pytest.raises(ValueError, match="out of range"):
            slots.land(ids(*layers), ids(*pages), ids(*of_layer), ids(0, 0), 1)
    with pytest.raises(ValueError, match="free slots"):
        slots.reserve(ids(0, 9, 10, 11, 12, 13))
    with pytest.raises(ValueError, match="as many"):
        slots.land(ids(0), ids(1), ids(0), ids(0, 0), 1)
    with pytest.raises(ValueError, match="as many"):
        slots.vacate(ids(0, 1), ids(0))
    with pytest.raises(ValueError, match="no page"):
        slots.vacate(ids(0), ids(0))
    with pytest.raises(TypeError, match="int64"):
        slots.absent(np.array([3], np.int32))
    assert same(before, books(table))
    with pytest.raises(ValueError, match="same L, P and S"):
        table.slot_of = np.zeros((2, 8), np.int32)
        type(slots)(table.uses.both, table.slot_of, table._pending, table._generation,
                    table.page_of, table.uses.slot_heat, table.uses.slot_stamp, table._free,
                    table._num_free)  # fmt: skip


def test_nothing_asked_for():
    table = NativeResidencyTable(PageUses(2, 9, 4))
    nothing = np.zeros(0, np.int64)
    assert not len(table.reserve(0, nothing).pages)
    assert table.commit(table.reserve(0, nothing), 1) == 0
    assert table.evict(0, 4, 1) == 0
    assert table.evict(0, 9, 1) == 0, "no slot has a page"
    table.check()
