"""What the presets decide."""

import pytest

from sglang_scout.core.config import parse_config
from sglang_scout.core.profile import RecallProfile
from sglang_scout.policy.presets import POLICY_NAMES, make_policy


def config(**kwargs):
    return parse_config(policy="scout", policies=POLICY_NAMES, available_cpus={0}, **kwargs)


def test_every_layer_is_predicted_exactly_once_and_one_layer_ahead():
    policy = make_policy(config(), num_layers=5)
    targets = [policy.predictor.targets(layer, 5) for layer in range(5)]
    assert targets == [(0, 1), (2,), (3,), (4,), ()]


def test_without_precompute_nothing_is_predicted():
    policy = make_policy(config(config='{"precompute": false}'), num_layers=5)
    assert not any(policy.predictor.targets(layer, 5) for layer in range(5))
    assert policy.predictor.lead == 0


def test_layers_take_turns():
    policy = make_policy(config(config='{"recall_interval": 4}'), num_layers=4)
    for step in range(8):
        assert sum(policy.residency.due(layer, step) for layer in range(4)) == 1


@pytest.mark.parametrize("mode", ["off"])
def test_recall_off(mode):
    policy = make_policy(config(config=f'{{"recall": "{mode}"}}'), num_layers=4)
    assert not any(policy.residency.due(layer, step) for layer in range(4) for step in range(99))
    assert policy.residency.recall_fresh()


def test_profiled_intervals():
    profile = RecallProfile(1, "m", 32, 2048, 0.12, [2, 0, 3], 3)
    policy = make_policy(config(recall_profile="p.json"), 3, profile)
    due = [[s for s in range(6) if policy.residency.due(layer, s)] for layer in range(3)]
    assert [len(d) for d in due] == [3, 0, 2]


def test_only_requests_that_fit_are_warmed_whole():
    residency = make_policy(config(), num_layers=1).residency
    assert list(residency.warm_columns(3, 4)) == [0, 1, 2]
    assert list(residency.warm_columns(4, 4)) == [0, 1, 2, 3]
    assert len(residency.warm_columns(5, 4)) == 0
