"""What the presets decide."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_scout.core.config import PREDICTORS
from sglang_scout.core.correction import StreamCorrection
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.parse_config import parse_config
from sglang_scout.core.profile import RecallProfile
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.predictors import CARRY, CurrentQuery, NextLayerQuery
from sglang_scout.policy.presets import POLICY_NAMES, make_policy, predictors

PAGE_BYTES = 2 * 32 * 8 * 128 * 2


def config(**kwargs):
    return parse_config(policy="scout", policies=POLICY_NAMES, available_cpus={0}, **kwargs)


def test_every_layer_is_predicted_exactly_once_and_one_layer_ahead():
    policy = make_policy(config(), num_layers=5, page_bytes=PAGE_BYTES)
    targets = [policy.predictor.targets(layer, 5) for layer in range(5)]
    assert targets == [(0, 1), (2,), (3,), (4,), ()]


def test_exact_layers_are_not_predicted_and_have_no_lead():
    exact = config(config='{"exact_layers": [3, 1, 1]}')
    policy = make_policy(exact, num_layers=6, page_bytes=PAGE_BYTES)
    targets = [policy.predictor.targets(layer, 6) for layer in range(6)]
    assert targets == [(0,), (2,), (), (4,), (5,), ()]
    aims = policy.residency.controller._target
    assert [layer for layer in range(6) if aims[layer] == 0.0] == [0, 1, 3], (
        "all misses are recalled"
    )
    with pytest.raises(ConfigError, match=r"exact_layers = \[1, 3\]: the model has layers 0 to 2"):
        make_policy(exact, num_layers=3, page_bytes=PAGE_BYTES)


def test_without_precompute_nothing_is_predicted():
    policy = make_policy(
        config(config='{"precompute": false}'), num_layers=5, page_bytes=PAGE_BYTES
    )
    assert not any(policy.predictor.targets(layer, 5) for layer in range(5))
    assert policy.predictor.lead == 0


def test_the_predictor_is_a_choice():
    learned = StreamCorrection("m", "w", 1, *(np.zeros(0, np.float32) for _ in range(4)))
    for name, expected in (
        ("next_layer", NextLayerQuery()),
        ("extrapolate", NextLayerQuery(carry=CARRY)),
        ("learned", NextLayerQuery(correction=learned)),
    ):
        settings = config(
            config=json.dumps({"predictor": name, "predictor_file": __file__, "quality": "q"})
        )
        for policy in POLICY_NAMES:
            made = make_policy(replace(settings, policy=policy), 3, PAGE_BYTES, None, learned)
            assert made.predictor == expected
        assert set(predictors(learned)) == set(PREDICTORS)
    off = make_policy(replace(settings, precompute=False), 3, PAGE_BYTES, None, learned)
    assert off.predictor == CurrentQuery(), "nothing is predicted, whatever the predictor"
    assert set(predictors(None)) == set(PREDICTORS) - {"learned"}


def test_layers_take_turns():
    policy = make_policy(
        config(config='{"recall": "fixed", "recall_interval": 4}'),
        num_layers=4,
        page_bytes=PAGE_BYTES,
    )
    for step in range(8):
        assert sum(policy.residency.due(layer, step) for layer in range(4)) == 1


@pytest.mark.parametrize("mode", ["off"])
def test_recall_off(mode):
    policy = make_policy(
        config(config=f'{{"recall": "{mode}"}}'), num_layers=4, page_bytes=PAGE_BYTES
    )
    assert not any(policy.residency.due(layer, step) for layer in range(4) for step in range(99))
    misses, uses = np.array([[[7, 3], [5, -1]]] * 2, np.int32), ResidencyTable(4, 9, 1).uses
    layers, pages = policy.residency.pick(np.array([1, 2]), misses, np.array([0, 1]), uses)
    assert (layers.tolist(), pages.tolist()) == ([1, 1, 2, 2], [3, 7, 3, 7])


def test_profiled_intervals():
    profile = RecallProfile(1, "m", 32, 2048, 0.12, [2, 0, 3], 3)
    settings = config(recall_profile="p.json", config='{"recall": "profile"}')
    policy = make_policy(settings, 3, PAGE_BYTES, profile)
    due = [[s for s in range(6) if policy.residency.due(layer, s)] for layer in range(3)]
    assert [len(d) for d in due] == [3, 0, 2]


def test_only_requests_that_fit_are_warmed_whole():
    residency = make_policy(config(), num_layers=1, page_bytes=PAGE_BYTES).residency
    assert list(residency.warm_columns(3, 4)) == [0, 1, 2]
    assert list(residency.warm_columns(4, 4)) == [0, 1, 2, 3]
    assert len(residency.warm_columns(5, 4)) == 0


PROFILE = RecallProfile(1, "m", 32, 2048, 0.2, [2, 0, 30], 3)


def described(profile=None, **keys):
    settings = config(config=json.dumps(keys), recall_profile="p.json" if profile else None)
    return make_policy(settings, 3, PAGE_BYTES, profile).residency.describe()


def test_adaptive_recall_is_the_default_and_starts_from_the_profile():
    assert described()["intervals"] == [8, 8, 8] and described()["threshold"] == 0.12
    assert described(recall_interval=3)["intervals"] == [3, 3, 3]
    assert described(PROFILE)["intervals"] == [2, 0, 30]
    assert described(PROFILE)["threshold"] == 0.2
    assert described(PROFILE, recall_threshold=0.05)["threshold"] == 0.05
    assert described(PROFILE, recall_threshold=0)["threshold"] == 0
    assert described(PROFILE, recall="profile")["intervals"] == [2, 0, 30]
    assert described(recall="fixed", recall_interval=4)["intervals"] == [4, 4, 4]


def test_the_bytes_of_a_step_are_counted_in_pages():
    assert PAGE_BYTES == 2**17
    assert described()["step_pages"] == 2048
    assert described(recall_step_mib=1)["step_pages"] == 8
    assert described(recall_step_mib=0.01)["step_pages"] == 1, "never none: recall = off says that"


def test_only_adaptive_recall_lets_a_step_begin_before_its_copies_have_ended():
    for mode, waits in (("off", True), ("fixed", True), ("adaptive", False)):
        settings = config(config=json.dumps({"recall": mode}))
        residency = make_policy(settings, 3, PAGE_BYTES).residency
        assert (residency.patience_us is None) == waits


def test_the_layer_without_a_lead_recalls_in_every_step():
    def targets(**keys):
        settings = config(config=json.dumps(keys))
        return make_policy(settings, 3, PAGE_BYTES).residency.controller._target.tolist()

    assert targets() == [0.0, 0.12, 0.12]
    assert targets(precompute=False) == [0.12] * 3, "then no layer has one"
