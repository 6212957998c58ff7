"""RheoServe's orchestrator: exchange, promotion and reserved slots. The table's test has its pins."""

import numpy as np
import pytest

from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import RESULT_DELAY_STEPS, StepReport
from sglang_scout.policy.rheo import HistoryAware

PERIOD, NONE = 4, np.zeros(0, np.int64)


def test_a_layer_exchanges_all_that_it_selected_since_its_last_turn_and_promotes_in_between():
    """Hot pages need not be those that the last step missed; promotion is limited by free slots."""
    residency = HistoryAware(page_size=32, step_pages=1, period=PERIOD)
    uses = ResidencyTable(2, 99, 4).uses
    spare, ages = np.array([9, 2]), np.zeros(1, np.int64)
    for step in range(1, 40):
        selected = np.array([[[step, 50 + step % 3, -1]]] * 2, np.int32)
        uses.touch(np.arange(2), selected, step, np.zeros(1, bool))
        residency.plan(StepReport(step + 2, 2, ages, *[NONE] * 5, late_pages=0, spare_slots=spare))
        missed = np.array([[[step, 50, 51, 52]]] * 2, np.int32)
        layers, pages = residency.pick(np.arange(2), missed, ages, uses)
        for layer in range(2):
            found = set(pages[layers == layer].tolist())
            if (step + 2 + layer) % PERIOD == 0:
                recent = range(max(1, step - PERIOD - RESULT_DELAY_STEPS + 3), step + 1)
                assert found == {*recent, *(50 + s % 3 for s in recent)}
            elif layer == 0:
                assert found == {step, 50, 51, 52}
            else:
                assert len(found) == 2 and found <= {50, 51, 52, step}


@pytest.mark.parametrize("max_new", [0, 999])
def test_pages_that_are_opened_push_out_none_if_slots_were_held_back(make, max_new):
    worker = make(
        policy="rheo",
        config='{"pilot_file": "w.npz"}',
        budget_tokens=128,
        max_batch=3,
        layers=2,
        pages=90,
        drift=0.3,
    )
    for length in (300, 311, 322):
        worker.admit(length, max_new=max_new)
    assert worker.table.pin_share == worker.engine.policy.residency.pin_share > 0
    evict, pushed_out = worker.table.evict, []

    def heard(layer, want_free, before_step, is_forced=True):
        gone = evict(layer, want_free, before_step, is_forced)
        pushed_out.append(gone * is_forced)
        return gone

    for step in range(60):
        if step == 16:  # every layer has had an exchange
            worker.table.evict = heard
        worker.step()
    assert (sum(pushed_out) == 0) == (max_new > 0)


def test_slots_are_held_back_for_what_comes_before_the_next_exchange():
    residency = HistoryAware(page_size=32, step_pages=1, period=16)
    lengths = np.array([16, 17, 31, 32, 32, 32])
    for max_new, expected in (
        ([0] * 6, 0),
        ([999] * 6, 5),  # the token after 16 more opens a page, the 16th does not
        ([999, 15, 1, 1, 0, 2], 2),
    ):
        assert residency.reserve(lengths, np.array(max_new)) == expected
    assert residency.loaded_pages(np.array([0, 3, 9]), 4).tolist() == [0, 3, 4]
