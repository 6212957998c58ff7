"""Which page gives its slot to which. What can happen to pages at all: test_residency_machine.py."""

import numpy as np
import pytest

from sglang_scout.core.pages import SWAP_MARGIN, ResidencyTable
from sglang_scout.core.uses import PageUses


def ids(*pages):
    return np.array(pages, np.int64)


def table(slots=4, half_life_steps=8.0, resident=()):
    made = ResidencyTable(PageUses(2, 20, slots, half_life_steps))
    if resident:
        made.commit(made.reserve(0, ids(*resident)), 0)
    return made


def touch(made, pages, step, fresh=None):
    """``pages`` of layer 0, of one row or ``[B, k]``."""
    rows = np.atleast_2d(pages).astype(np.int32)
    fresh = np.zeros(len(rows), bool) if fresh is None else fresh
    made.uses.touch(np.array([0]), rows[None], step, fresh)


def resident(made, layer=0):
    return sorted(np.flatnonzero(made.slot_of[layer] >= 0).tolist())


def test_a_page_selected_once_does_not_push_out_one_that_is_selected_often():
    made = table(slots=3, resident=(1, 2, 3))
    for step in range(1, 21):
        touch(made, ids(1, 2) if step % 2 else ids(2), step)
    touch(made, ids(9, 2), 21)
    taken = made.exchange(0, ids(9), 21)
    made.commit(taken, 21)
    # Page 3 was never selected. Page 1 lies longer back than 9, yet is the hotter one.
    assert resident(made) == [1, 2, 9]
    assert not len(made.exchange(0, ids(8), 21).pages), "never selected: not worth a slot"


def test_a_page_takes_a_slot_as_soon_as_it_is_clearly_hotter():
    made = table(slots=1, resident=(1,))
    touch(made, ids(1), 1)
    won = None
    for step in range(2, 9):
        touch(made, ids(7), step)
        ratio = made.uses.heat[0, 7] / made.uses.heat[0, 1]
        if len(made.exchange(0, ids(7), step).pages):
            won = step
            assert ratio > SWAP_MARGIN
            break
        assert ratio <= SWAP_MARGIN
    assert won == 3, "after two selections against one"


def test_a_page_that_lands_in_the_step_that_looked_for_it_stays():
    made = table(slots=2, resident=(2,))
    touch(made, ids(2, 2, 2), 0)
    taken = made.reserve(0, ids(3))
    touch(made, ids(3), 1)
    made.commit(taken, 0)
    for _ in range(9):
        touch(made, ids(7), 1)
    made.commit(made.exchange(0, ids(7), 1), 1)
    assert resident(made) == [3, 7], "3 is the coldest, and in use"


def test_two_pages_of_equal_use_do_not_change_places():
    made = table(slots=1, resident=(1,))
    moved = 0
    for step in range(1, 101):
        page, other = (1, 7) if step % 2 else (7, 1)
        touch(made, ids(page), step)
        if made.slot_of[0, page] < 0:
            taken = made.exchange(0, ids(page), step)
            moved += len(taken.pages)
            made.commit(taken, step)
    assert moved <= 2


def test_what_the_step_selected_is_never_taken():
    made = table(slots=2, resident=(1, 2))
    touch(made, ids(1, 2), 5)
    for _ in range(9):
        touch(made, ids(8), 5)
    assert not len(made.exchange(0, ids(8), 5).pages)
    assert len(made.exchange(0, ids(8), 6).pages) == 1


def test_free_slots_need_no_contest():
    made = table(slots=4, resident=(1,))
    for step in range(50):
        touch(made, ids(1), step)
    assert made.exchange(0, ids(5, 6, 7), 50).pages.tolist() == [5, 6, 7]


def test_with_too_few_slots_the_hottest_are_taken():
    made = table(slots=2)
    touch(made, ids(5, 3, 3, 9, 9, 9), 1)
    assert made.reserve(0, ids(3, 5, 9)).pages.tolist() == [3, 9]


def test_a_newcomer_s_pages_count_as_selected_for_long():
    made = table(slots=2, resident=(1, 2))
    for step in range(1, 40):
        touch(made, ids(1, 2), step)
    rows = np.array([[1, 2], [8, 9]])
    touch(made, rows, 40, np.array([False, True]))
    assert made.uses.heat[0, 8] == pytest.approx(made.uses.heat[0, 1], rel=0.1)
    assert made.uses.heat[0, 8] == made.uses.heat[0, 9]


def test_eviction_takes_the_coldest_first():
    made = table(slots=4, resident=(1, 2, 3, 4))
    for step, pages in enumerate([(4,), (4, 3), (4, 3, 2), (1,)], start=1):
        touch(made, ids(*pages), step)
    gone = []
    for want in (1, 2, 3):
        before = set(resident(made))
        assert made.evict(0, want, 10) == 1
        gone += before - set(resident(made))
    assert gone == [2, 1, 3], "one lately selected page is hotter than one selected a while ago"


def test_heat_is_kept_in_range_over_a_long_life():
    made = table(slots=2, half_life_steps=1.0, resident=(1, 2))
    for step in range(1, 2000):
        touch(made, ids(1), step)
        if step % 3 == 0:
            touch(made, ids(2), step)
        assert np.isfinite(made.uses.heat).all()
    assert made.uses.heat[0, 1] > made.uses.heat[0, 2] > 0
    touch(made, ids(2), 9000)  # after a long silence
    assert np.isfinite(made.uses.heat).all() and made.uses.heat[0, 2] > made.uses.heat[0, 1]


def test_a_freed_page_is_cold():
    made = table(slots=2, resident=(1, 2))
    for step in range(9):
        touch(made, ids(1), step)
    made.invalidate(ids(1))
    assert (made.uses.heat[:, 1] == 0).all()
