"""What pages have been of use: the definition, in plain Python, against numpy and C++; and sorting within groups."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.pages import ResidencyTable
from sglang_scout.core.ranking import distinct, rank_within
from sglang_scout.core.uses import PageUses
from sglang_scout.ops.native_uses import NativePageUses

LAYERS, PAGES, BATCH, K = 3, 90, 3, 5
EVERY = np.arange(LAYERS)
BOTH = pytest.mark.parametrize("kind", [PageUses, NativePageUses])


def coldest_by_a_look_at_all(uses, counts, before_step, below):
    found = []
    for layer, count in enumerate(counts):
        slots = [
            (uses.heat[layer, page], uses.stamp[layer, page], slot)
            for slot, page in enumerate(uses.page_of[layer])
            if page >= 0
            and uses.stamp[layer, page] < before_step
            and uses.heat[layer, page] < below[layer]
        ]
        found += [(layer, slot, heat) for heat, _, slot in sorted(slots)[: max(count, 0)]]
    return found


def hottest_by_a_look_at_all(uses, layers, missed, counts, is_first, limits):
    found = []
    for i, layer in enumerate(layers):
        worth = defaultdict(lambda: (1,))
        for b in np.flatnonzero(counts[i]):
            for page in missed[i, b][missed[i, b] >= 0]:
                rank = (0 if is_first[b] else 1, -uses.heat[layer, page], page)
                worth[int(page)] = min(rank, worth[int(page)] if page in worth else rank)
        best = sorted(worth, key=worth.__getitem__)[: max(limits[i], 0)]
        found += [(layer, page) for page in sorted(best)]
    return found


def check_slots(uses):
    """What is said of slots is what is said of their pages."""
    is_page = uses.page_of >= 0
    at = np.arange(len(is_page))[:, None], np.maximum(uses.page_of, 0)
    assert (uses.slot_heat == np.where(is_page, uses.heat[at], np.inf)).all()
    assert (uses.slot_stamp == uses.stamp[at])[is_page].all()


def pairs(*arrays):
    return list(zip(*(a.tolist() for a in arrays), strict=True))


@BOTH
@pytest.mark.parametrize("slots", [3, 40, 70])
@given(seed=st.integers(0, 2**32 - 1))
def test_the_coldest_and_the_hottest_whatever_happened_before(kind, slots, seed):
    rng = np.random.default_rng(seed)
    half_life_steps = float(rng.choice([0.5, 2.0, 8.0]))
    # Beside it, what only numpy has been through: equal to the last bit at every step.
    uses, plain = (of(LAYERS, PAGES, slots, half_life_steps) for of in (kind, PageUses))
    table, other = ResidencyTable(uses), ResidencyTable(plain)
    step = 0
    for _ in range(25):
        step += int(rng.choice([1, 1, 60]))  # far apart, heat is rescaled
        chosen = rng.integers(-1, PAGES, (LAYERS, BATCH, K), np.int32) // np.int32(
            rng.choice([1, 2, 3])
        )
        some = np.flatnonzero(rng.random(LAYERS) < 0.8)
        fresh = rng.random(BATCH) < 0.3
        protected = rng.integers(-1, PAGES, 2)
        absent = (table.slot_of[:, protected[protected >= 0]] < 0).sum()
        for each in (table, other):
            each.uses.touch(some, chosen[some], step, fresh)
            assert each.touch_all_layers(protected, step) == absent
        assert (uses.both == plain.both).all()
        check_slots(uses)

        before_step = step - int(rng.integers(0, 3))
        counts = rng.integers(-1, 7, LAYERS)
        below = rng.choice(np.append(uses.heat[:, :9].max(1), np.inf).astype(np.float32), LAYERS)
        found = uses.coldest(counts, before_step, below)
        assert pairs(*found) == coldest_by_a_look_at_all(uses, counts, before_step, below)

        wide = rng.integers(-1, PAGES, (LAYERS, BATCH + 1, K), np.int32)
        missed = wide[:, :BATCH][some]  # with the strides of a larger batch, unless copied
        missed = wide[:, :BATCH] if len(some) == LAYERS else missed
        may = rng.random((len(some), BATCH)) < 0.7
        asked = some, missed, may, rng.random(BATCH) < 0.3, rng.integers(-1, 12, len(some))
        assert pairs(*uses.hottest(*asked)) == hottest_by_a_look_at_all(uses, *asked)

        what = rng.random()
        gone = rng.integers(0, PAGES, 9)
        for each in (table, other):
            if what < 0.3:
                each.evict(EVERY, counts, before_step)
            else:
                taken = each.exchange(EVERY[:, None, None], chosen, before_step)
                each.commit(taken, step)
            if what > 0.9:
                each.invalidate(gone)
            each.check()
            check_slots(each.uses)
        assert (table.slot_of == other.slot_of).all()


@BOTH
def test_the_hottest_pages_win_and_those_of_first_rows_before_them(kind):
    uses = kind(3, 20, 1)
    uses.heat[1, [3, 5, 7, 9]] = [4, 3, 2, 1]
    uses.heat[2, [3, 5, 7, 9]] = [1, 2, 3, 3]
    layers = np.array([1, 2])
    missed = np.tile(np.array([[9, 7, -1], [3, 5, 9]], np.int32), (2, 1, 1))
    nobody, everybody = np.zeros(2, bool), np.ones((2, 2), bool)

    def best(limits, first=nobody, counts=everybody, missed=missed):
        found, pages = uses.hottest(layers, missed, counts, first, np.array(limits))
        return [pages[found == layer].tolist() for layer in layers]

    assert best([2, 3]) == [[3, 5], [5, 7, 9]], "equal heat: by page"
    assert best([9, 0]) == [[3, 5, 7, 9], []]
    assert best([3, 1], np.array([True, False])) == [[3, 7, 9], [7]]
    assert best([9, 2], counts=np.array([[True, False], [False, True]])) == [[7, 9], [5, 9]]
    assert best([9, 9], counts=np.array([[True, False], [False, True]])) == [[7, 9], [3, 5, 9]]
    assert best([4, 4], missed=missed[:, :0], first=nobody[:0], counts=everybody[:, :0]) == [[], []]


@BOTH
def test_pages_that_heat_does_not_tell_apart(kind):
    uses = kind(1, 9, 4)
    zeros = np.zeros(3, np.int64)
    uses.map(zeros[:2], np.array([0, 1]), np.array([5, 4]), 3)
    uses.map(zeros[:1], np.array([3]), np.array([7]), 1)
    inf = np.full(1, np.inf, np.float32)
    assert pairs(*uses.coldest(np.array([9]), 9, inf)) == [(0, 3, 0.0), (0, 0, 0.0), (0, 1, 0.0)]
    assert not len(uses.coldest(np.array([9]), 9, np.zeros(1, np.float32))[0]), "none is below 0"
    missed = np.array([[[8, 2, 2, -1, 6]]], np.int32)
    one = np.ones((1, 1), bool)
    assert pairs(*uses.hottest(np.array([0]), missed, one, one[0], np.array([2]))) == [
        (0, 2),
        (0, 6),
    ]


@BOTH
@given(seed=st.integers(0, 2**32 - 1))
def test_pages_are_counted_by_row(kind, seed):
    rng = np.random.default_rng(seed)
    layers, rows, k = rng.integers(0, 9, 3)
    wide = rng.integers(-2, 3, (layers, rows + 2, k), np.int32)
    pages = wide[:, :rows]
    counts = kind(1, 1, 1).count(pages)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[sum(p >= 0 for p in row) for row in of] for of in pages.tolist()]


@BOTH
@pytest.mark.parametrize("free", [0, 1])
def test_what_is_in_use_does_not_go_whatever_its_heat(kind, free):
    uses = kind(2, 9, 3 + free)
    table = ResidencyTable(uses)
    table.commit(table.reserve(EVERY[:2, None], np.tile([1, 2, 3], (2, 1))), 0)
    table.evict(np.array([1]), 1 + free, 1)
    assert table.touch_all_layers(np.array([2, 3, -1, 3, 8]), 4) == 2, "8, in both layers"
    check_slots(uses)
    inf = np.full(2, np.inf, np.float32)
    layers, slots, _ = uses.coldest(np.full(2, 9), 4, inf)
    assert pairs(layers, uses.page_of[layers, slots]) == [(0, 1)]
    assert len(uses.coldest(np.full(2, 9), 5, inf)[0]) == 5
    assert table.touch_all_layers(np.zeros(0, np.int64), 5) == 0


@BOTH
def test_nothing_asked_for(kind):
    uses = kind(2, 9, 4)
    nothing = np.zeros((2, 0, 0), np.int32)
    uses.touch(np.arange(2), nothing, 1, np.zeros(0, bool))
    uses.touch(np.zeros(0, np.int64), np.zeros((0, 3, 4), np.int32), 1, np.zeros(3, bool))
    none = np.zeros((2, 0), bool)
    assert not len(uses.hottest(np.arange(2), nothing, none, none[0], np.full(2, 5))[0])
    inf = np.full(2, np.inf, np.float32)
    assert not len(uses.coldest(np.full(2, 5), 9, inf)[0]), "no slot has a page"
    assert (uses.heat == 0).all() and (uses.stamp == -1).all()
    with pytest.raises(ValueError, match="num_slots=0"):
        kind(1, 1, 0)


def test_what_is_out_of_range_is_refused_before_anything_is_written():
    uses = NativePageUses(2, 9, 4)
    rows = np.zeros(1, bool)
    for layers, page in (([2], 1), ([-1], 1), ([0], 9), ([0], -2), ([0], 2**31 - 1)):
        missed = np.array([[[3, page]]], np.int32)
        with pytest.raises(ValueError, match="out of range"):
            uses.touch(np.array(layers), missed, 1, rows)
        with pytest.raises(ValueError, match="out of range"):
            uses.hottest(np.array(layers), missed, ~rows[None], rows, np.array([1]))
    assert (uses.heat == 0).all()
    with pytest.raises(TypeError, match="int32"):  # would be another page
        uses.touch(np.arange(1), np.full((1, 1, 1), 2**32 + 5), 1, rows)
    with pytest.raises(ValueError, match=r"\[n\]"):
        uses.touch(np.arange(2), np.zeros((1, 1, 1), np.int32), 1, rows)
    with pytest.raises(ValueError, match=r"\[B\]"):
        uses.touch(np.arange(1), np.zeros((1, 2, 1), np.int32), 1, rows)
    with pytest.raises(ValueError, match="limits"):
        uses.hottest(np.arange(1), np.zeros((1, 1, 1), np.int32), ~rows[None], rows, np.arange(2))
    slot_of = np.full((2, 9), -1, np.int32)
    for page in (-1, 9):
        with pytest.raises(ValueError, match="out of range"):
            uses.protect(np.array([3, page]), slot_of, 1)
    assert (uses.stamp == -1).all()
    with pytest.raises(ValueError, match="slot_of"):
        uses.protect(np.array([3]), slot_of[:, :8].copy(), 1)
    uses.page_of[1, 2] = 9
    with pytest.raises(ValueError, match="out of range"):
        uses.touch(np.arange(2), np.full((2, 1, 1), -1, np.int32), 1, rows)


def test_ranks_and_distinct_values():
    assert rank_within(np.array([0, 0, 2, 2, 2, 5])).tolist() == [0, 1, 0, 1, 2, 0]
    assert not len(rank_within(np.zeros(0, np.int64))) and not len(distinct(np.zeros(0, np.int32)))
    assert distinct(np.array([[3, 1], [3, -1]], np.int32)).tolist() == [-1, 1, 3]
