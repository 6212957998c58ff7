"""Decisions of the presets."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import parse_config
from sglang_scout.core.profile import RecallProfile
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy import Context, make_policy, policies

PAGE_BYTES = 2 * 32 * 8 * 128 * 2


def config(**kwargs):
    return parse_config(policy="scout", policies=policies(), available_cpus={0}, **kwargs)


def make(settings, num_layers=3, profile=None):
    return make_policy(Context(settings, num_layers, PAGE_BYTES, profile))


@pytest.mark.parametrize(
    ("keys", "targets", "eager"),
    [
        ("{}", [(0, 1), (2,), (3,), (4,), (5,), ()], [0]),
        ('{"precompute": false}', [()] * 6, []),  # no layer has a lead
        ('{"exact_layers": [3, 1, 1]}', [(0,), (2,), (), (4,), (5,), ()], [0, 1, 3]),
    ],
)
def test_layers_are_predicted_one_ahead_but_for_exact_ones(keys, targets, eager):
    """Those that are not recall all that they miss, if others are."""
    policy = make(config(config=keys), 6)
    assert [policy.query.targets(layer, 6) for layer in range(6)] == targets
    assert np.flatnonzero(policy.residency._target == 0.0).tolist() == eager


def test_exact_layers_must_exist():
    with pytest.raises(ConfigError, match=r"exact_layers = \[3\]: the model has layers 0 to 2"):
        make(config(config='{"exact_layers": [3]}'), 3)


def due_in(residency, steps):
    for step in range(steps):
        residency.plan(SimpleNamespace(step=step))
        yield residency.is_due


def test_the_paper_s_choices():
    """Sections 2.2, 3.3 and 3.4."""
    policy = make(config(config='{"paper": true}', recall_profile="p.json"), 3, PROFILE)
    rule, residency = policy.rule, policy.residency
    assert (rule.digest.name, rule.reweigh, rule.only_selected) == ("minmax", False, True)
    assert policy.query.targets(0, 3) == (0, 1) and policy.query.attends
    due = [np.flatnonzero(layer) for layer in np.array(list(due_in(residency, 60))).T]
    assert [set(np.diff(steps)) for steps in due] == [{2}, set(), {30}]


def test_layers_take_turns():
    policy = make(config(config='{"recall": "fixed"}'), 4)
    due = [np.flatnonzero(layer) for layer in np.array(list(due_in(policy.residency, 16))).T]
    assert all(len(steps) == 2 and steps[1] - steps[0] == 8 for steps in due)
    assert len({steps[0] for steps in due}) == 4


def test_recall_off():
    policy = make(config(config='{"recall": "off"}'), 2)
    assert not np.any(list(due_in(policy.residency, 99)))
    misses, uses = np.array([[[7, 3], [5, -1]]] * 2, np.int32), ResidencyTable(2, 9, 1).uses
    layers, pages = policy.residency.pick(misses, np.array([0, 1]), uses)
    assert (layers.tolist(), pages.tolist()) == ([0, 0, 1, 1], [3, 7, 3, 7])


PROFILE = RecallProfile(1, "m", 32, 2048, 0.2, [2, 0, 30], 3)


@pytest.mark.parametrize(
    ("profile", "keys", "expected"),
    [
        (None, {}, {"intervals": [8, 8, 8], "threshold": 0.12, "step_pages": 2048}),
        (None, {"recall_interval": 3}, {"intervals": [3, 3, 3]}),
        (PROFILE, {}, {"intervals": [2, 0, 30], "threshold": 0.2}),
        (PROFILE, {"recall_threshold": 0.05}, {"threshold": 0.05}),
        (PROFILE, {"recall_threshold": 0}, {"threshold": 0}),
        (PROFILE, {"recall": "fixed"}, {"intervals": [2, 0, 30]}),
        (PROFILE, {"paper": True}, {"intervals": [2, 0, 30]}),
        (None, {"recall": "fixed", "recall_interval": 4}, {"intervals": [4, 4, 4]}),
        (None, {"recall_step_mib": 1}, {"step_pages": 8}),
        (None, {"recall_step_mib": 0.01}, {"step_pages": 1}),  # never none: recall = off says that
    ],
    ids=str,
)
def test_recall_is_as_the_keys_and_the_profile_say(profile, keys, expected):
    settings = config(config=json.dumps(keys), recall_profile="p.json" if profile else None)
    residency = make(settings, 3, profile).residency
    assert residency.describe() | expected == residency.describe()
    is_adaptive = "threshold" in residency.describe()
    assert is_adaptive == (keys.get("recall") != "fixed" and "paper" not in keys)
    # Only then may a step begin before its copies have ended.
    assert (residency.patience_us is None) != is_adaptive
