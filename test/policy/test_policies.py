"""Decisions of the presets."""

import json

import numpy as np
import pytest

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import parse_config
from sglang_scout.core.profile import RecallProfile
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import (
    RESULT_DELAY_STEPS,
    Context,
    StepReport,
    make_policy,
    policies,
)
from sglang_scout.policy.rheo import HistoryAware

PAGE_BYTES = 2 * 32 * 8 * 128 * 2


def config(**kwargs):
    return parse_config(policy="scout", policies=policies(), available_cpus={0}, **kwargs)


def make(settings, num_layers=3, profile=None):
    return make_policy(Context(settings, num_layers, PAGE_BYTES, profile))


def targets_of(policy, layers):
    return [policy.query.targets(layer, layers) for layer in range(layers)]


def test_every_layer_is_predicted_exactly_once_and_one_layer_ahead():
    assert targets_of(make(config(), 5), 5) == [(0, 1), (2,), (3,), (4,), ()]
    assert targets_of(make(config(config='{"precompute": false}'), 5), 5) == [()] * 5


def test_exact_layers_are_not_predicted_and_have_no_lead():
    exact = config(config='{"exact_layers": [3, 1, 1]}')
    policy = make(exact, 6)
    assert targets_of(policy, 6) == [(0,), (2,), (), (4,), (5,), ()]
    aims = policy.residency._target
    assert np.flatnonzero(aims == 0.0).tolist() == [0, 1, 3], "all misses are recalled"
    with pytest.raises(
        ConfigError, match=r"exact_layers = \[3, 1, 1\]: the model has layers 0 to 2"
    ):
        make(exact, 3)


def test_the_paper_s_choices():
    """Sections 2.2, 3.3 and 3.4."""
    policy = make(config(config='{"paper": true}'), 4)
    rule, residency = policy.rule, policy.residency
    assert (rule.kind, rule.reweigh, rule.only_selected) == ("minmax", False, True)
    assert policy.query.targets(0, 4) == (0, 1) and policy.query.attends
    due = [[step for step in range(1, 17) if residency.due(layer, step)] for layer in range(4)]
    assert all(len(steps) == 2 and steps[1] - steps[0] == 8 for steps in due)
    assert len({steps[0] for steps in due}) == 4, "layers take turns"


def test_recall_off():
    policy = make(config(config='{"recall": "off"}'), 4)
    assert not any(policy.residency.due(layer, step) for layer in range(4) for step in range(99))
    misses, uses = np.array([[[7, 3], [5, -1]]] * 2, np.int32), ResidencyTable(4, 9, 1).uses
    layers, pages = policy.residency.pick(np.array([1, 2]), misses, np.array([0, 1]), uses)
    assert (layers.tolist(), pages.tolist()) == ([1, 1, 2, 2], [3, 7, 3, 7])


PROFILE = RecallProfile(1, "m", 32, 2048, 0.2, [2, 0, 30], 3)


def described(profile=None, **keys):
    settings = config(config=json.dumps(keys), recall_profile="p.json" if profile else None)
    return make(settings, 3, profile).residency.describe()


def test_adaptive_recall_is_the_default_and_starts_from_the_profile():
    assert described()["intervals"] == [8, 8, 8] and described()["threshold"] == 0.12
    assert described(recall_interval=3)["intervals"] == [3, 3, 3]
    assert described(PROFILE)["intervals"] == [2, 0, 30]
    assert described(PROFILE)["threshold"] == 0.2
    assert described(PROFILE, recall_threshold=0.05)["threshold"] == 0.05
    assert described(PROFILE, recall_threshold=0)["threshold"] == 0
    assert described(PROFILE, recall="fixed")["intervals"] == [2, 0, 30]
    assert described(PROFILE, paper=True)["intervals"] == [2, 0, 30], "as in the paper"
    assert described(recall="fixed", recall_interval=4)["intervals"] == [4, 4, 4]


def test_the_bytes_of_a_step_are_counted_in_pages():
    assert PAGE_BYTES == 2**17
    assert described()["step_pages"] == 2048
    assert described(recall_step_mib=1)["step_pages"] == 8
    assert described(recall_step_mib=0.01)["step_pages"] == 1, "never none: recall = off says that"


def test_only_adaptive_recall_lets_a_step_begin_before_its_copies_have_ended():
    for mode, waits in (("off", True), ("fixed", True), ("adaptive", False)):
        settings = config(config=json.dumps({"recall": mode}))
        residency = make(settings).residency
        assert (residency.patience_us is None) == waits


def test_the_layer_without_a_lead_recalls_in_every_step():
    def targets(**keys):
        settings = config(config=json.dumps(keys))
        return make(settings).residency._target.tolist()

    assert targets() == [0.0, 0.12, 0.12]
    assert targets(precompute=False) == [0.12] * 3, "then no layer has one"


def test_a_layer_exchanges_all_that_it_selected_since_its_last_turn_and_promotes_in_between():
    """Hot pages need not be those that the last step missed; promotion is limited by free slots."""
    period, none = 4, np.zeros(0, np.int64)
    residency = HistoryAware(page_size=32, step_pages=1, period=period)
    uses = ResidencyTable(2, 99, 4).uses
    spare, ages = np.array([9, 2]), np.zeros(1, np.int64)
    for step in range(1, 40):
        selected = np.array([[[step, 50 + step % 3, -1]]] * 2, np.int32)
        uses.touch(np.arange(2), selected, step, np.zeros(1, bool))
        residency.plan(StepReport(step + 2, 2, ages, *[none] * 5, late_pages=0, spare_slots=spare))
        missed = np.array([[[step, 50, 51, 52]]] * 2, np.int32)
        layers, pages = residency.pick(np.arange(2), missed, ages, uses)
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
    residency = HistoryAware(page_size=32, step_pages=1, period=16)
    lengths = np.array([16, 17, 31, 32, 32, 32])
    for max_new, expected in (
        ([0] * 6, 0),
        ([999] * 6, 5),  # the token after 16 more opens a page, the 16th does not
        ([999, 15, 1, 1, 0, 2], 2),
    ):
        assert residency.reserve(lengths, np.array(max_new)) == expected
    assert [residency.loaded_pages(full, 4) for full in (0, 3, 9)] == [0, 3, 4]
