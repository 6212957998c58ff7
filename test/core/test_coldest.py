"""The shortcut to the coldest slots against a look at all of them, and sorting within groups."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core import ranking
from sglang_scout.core.pages import ResidencyTable
from sglang_scout.core.ranking import bits_of, distinct, least_of_each, rank_within

LAYERS, PAGES = 3, 90


def by_a_look_at_all(table, counts, before_step, below):
    found = []
    for layer, count in enumerate(counts):
        slots = np.flatnonzero(table.page_of[layer] >= 0)
        slots = slots[table.stamp[layer, table.page_of[layer, slots]] < before_step]
        slots = slots[table.heat[layer, table.page_of[layer, slots]] < below[layer]]
        pages = table.page_of[layer, slots]
        order = np.lexsort((slots, table.stamp[layer, pages], table.heat[layer, pages]))
        found += [(layer, int(slot)) for slot in slots[order[: max(count, 0)]]]
    return found


@pytest.mark.parametrize("slots", [3, 40, 70])
@given(seed=st.integers(0, 2**32 - 1))
def test_the_coldest_are_found_whatever_happened_before(slots, seed):
    rng = np.random.default_rng(seed)
    table = ResidencyTable(LAYERS, PAGES, slots, half_life_steps=float(rng.choice([0.5, 2.0, 8.0])))
    every = np.arange(LAYERS)[:, None]
    step = 0
    for _ in range(40):
        step += int(rng.choice([1, 1, 60]))  # far apart, heat is rescaled
        chosen = rng.integers(1, PAGES, (LAYERS, 12)) // rng.integers(1, 4)
        table.touch(every, chosen, step)
        table.touch_all_layers(rng.integers(0, PAGES, 2), step)
        before_step = step - int(rng.integers(0, 3))
        counts = rng.integers(-1, 7, LAYERS)
        below = rng.choice(np.append(table.heat[:, :9].max(1), np.inf).astype(np.float32), LAYERS)
        layers, found, heat = table._cold.find(counts, before_step, below)
        assert list(zip(layers.tolist(), found.tolist(), strict=True)) == by_a_look_at_all(
            table, counts, before_step, below
        )
        assert (heat == table.heat[layers, table.page_of[layers, found]]).all()
        if rng.random() < 0.3:
            table.evict(np.arange(LAYERS), counts, before_step)
        else:
            table.commit(table.exchange(every, chosen, before_step), step)
        if rng.random() < 0.1:
            table.invalidate(rng.integers(0, PAGES, 9))
        table.check()


@pytest.mark.parametrize("few", [0, 256])
@given(
    groups=st.lists(st.integers(0, 4), max_size=30),
    counts=st.lists(st.integers(-1, 6), min_size=5, max_size=5),
    data=st.data(),
)
def test_the_least_of_each_group(few, groups, counts, data):
    size = {"min_size": len(groups), "max_size": len(groups)}
    numbers = st.lists(st.integers(0, 2**33 - 1) | st.integers(0, 2), **size)
    ranks, ties = data.draw(numbers), data.draw(numbers)
    arrays = [np.array(x, np.int64) for x in (groups, ranks, counts, ties)]
    for with_ties in (False, True):
        expected = []
        for group, count in enumerate(counts):
            own = [i for i in range(len(groups)) if groups[i] == group]
            own.sort(key=lambda i: (ranks[i], ties[i] if with_ties else 0, i))
            expected += own[: max(count, 0)]
        with mock.patch.object(ranking, "_FEW", few):
            got = least_of_each(*arrays[:3], arrays[3] if with_ties else None)
        assert got.tolist() == expected


def test_ranks_and_distinct_values():
    assert rank_within(np.array([0, 0, 2, 2, 2, 5])).tolist() == [0, 1, 0, 1, 2, 0]
    assert not len(rank_within(np.zeros(0, np.int64))) and not len(distinct(np.zeros(0, np.int32)))
    assert distinct(np.array([[3, 1], [3, -1]], np.int32)).tolist() == [-1, 1, 3]
    heat = np.array([0.0, -0.0, 1e-30, 0.5, 1.0, 2.0**64], np.float32)
    assert (np.diff(bits_of(heat)) >= 0).all() and bits_of(heat)[0] == bits_of(heat)[1] == 0
