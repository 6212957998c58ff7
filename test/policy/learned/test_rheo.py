"""RheoServe's residency."""

import numpy as np

from sglang_scout.engine import RESULT_DELAY_STEPS
from sglang_scout.engine.policy import StepReport
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.learned.rheo import HistoryAware


def test_a_layer_exchanges_all_that_it_selected_since_its_last_turn_and_promotes_in_between():
    """Hot pages need not be those that the last step missed; promotion is limited by free slots."""
    period, none = 4, np.zeros(0, np.int64)
    residency = HistoryAware(2, page_size=32, spare_pages=1, period=period)
    uses = ResidencyTable(2, 99, 4).uses
    spare, ages = np.array([9, 2]), np.zeros(1, np.int64)
    for step in range(1, 40):
        selected = np.array([[[step, 50 + step % 3, -1]]] * 2, np.int32)
        uses.touch(np.arange(2), selected, step, np.zeros(1, bool))
        residency.plan(StepReport(step + 2, 2, ages, *[none] * 5, late_pages=0, spare_slots=spare))
        missed = np.array([[[step, 50, 51, 52]]] * 2, np.int32)
        layers, pages = residency.pick(missed, ages, uses)
        for layer in range(2):
            found = set(pages[layers == layer].tolist())
            if (step + 2 + layer) % period == 0:
                recent = range(max(1, step - period - RESULT_DELAY_STEPS + 3), step + 1)
                assert found == {*recent, *(50 + s % 3 for s in recent)}
            elif layer == 0:
                assert found == {step, 50, 51, 52}
            else:
                assert len(found) == 2 and found <= {50, 51, 52, step}


def test_slots_are_held_back_for_what_comes_before_the_next_exchange():
    residency = HistoryAware(2, page_size=32, spare_pages=1)
    lengths = np.array([16, 17, 31, 32, 32, 32])
    for max_new, expected in (
        ([0] * 6, 0),
        ([999] * 6, 5),  # the token after 16 more opens a page, the 16th does not
        ([999, 15, 1, 1, 0, 2], 2),
    ):
        assert residency.reserve(lengths, np.array(max_new)) == expected
    assert [residency.loaded_pages(full, 4) for full in (0, 3, 9)] == [0, 3, 4]


def test_a_page_that_was_important_for_long_outlives_a_pause(make):
    """Against pages selected once; and the first step of a request is no history."""
    rheo = {"policy": "rheo", "config": '{"digest": "minmax"}'}
    worker = make(budget_tokens=64, resident_tokens=32, max_batch=1, pages=400, **rheo)
    table, slots, none = worker.table, worker.table.num_slots, np.zeros(1, bool)

    def select(pages, step, is_new=none):
        """And exchange all of them."""
        table.uses.touch(np.array([0]), np.array([[pages]], np.int32), step, is_new)
        table.commit(table.exchange(0, np.array(pages), step), step)

    step, others = 0, iter(range(9, 400))
    for page in range(1, slots + 1):
        select([page], step := step + 1, ~none if page == 2 else none)
    for _ in range(100):
        select([1], step := step + 1)
    for _ in range(200):
        select([next(others)], step := step + 1)
    assert table.slot_of[0, 1] >= 0, "selected in 101 of 300 steps, though not in the last 200"
    for _ in range(20):
        for page in range(50, 50 + slots - 1):
            select([page], step := step + 1)
    assert table.slot_of[0, 1] >= 0 and table.slot_of[0, 2] < 0
