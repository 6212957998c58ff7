"""/metrics against /server_info: the same numbers, under the documented names."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from sglang_scout.engine.counters import Counters, StepTimes
from sglang_scout.plugin import metrics as metrics_module

PROMISED = [
    name
    for name, stat in metrics_module.METRICS.items()
    if stat.kind != "histogram" and not name.startswith("worker_") and name != "recall_wait_seconds"
]
STATE = {name: number for number, name in enumerate(PROMISED, 2)}
STATE |= {"recall_wait_us": 8, "worker": {"state": "ready", "restarts": 4}}


@pytest.fixture
def counters():
    return Counters(1)


@pytest.fixture
def metrics(monkeypatch, counters):
    monkeypatch.setattr(metrics_module, "decode_state", lambda backend: STATE.copy())
    monkeypatch.setattr(metrics_module, "PUBLISH_INTERVAL_S", 3600.0)
    before = set(REGISTRY._collector_to_names)
    backend = SimpleNamespace(engine=SimpleNamespace(counters=counters))
    made = metrics_module.Metrics(backend, {"tp_rank": "0"})
    yield made
    made.close()
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def published(name):
    """Counters have a suffix."""
    found = [
        REGISTRY.get_sample_value(f"sglang:kv_offload_{x}", {"tp_rank": "0"})
        for x in (name, name + "_total")
    ]
    return next((x for x in found if x is not None), None)


def test_metrics_have_the_numbers_of_the_state(metrics):
    for _ in range(2):  # a counter is not counted twice
        metrics.publish()
        assert {name: published(name) for name in PROMISED} == {n: STATE[n] for n in PROMISED}
    assert published("recall_wait_seconds") == 8e-6
    assert published("worker_restarts") == 4 and published("worker_up") == 1


def test_each_step_is_observed_once(metrics, counters):
    counters.times.append(StepTimes(0.03, 0.004, 0.0))
    counters.times.append(StepTimes(0.05, 0.004, 0.001))
    for _ in range(2):
        metrics.publish()
    labels = {"tp_rank": "0"}
    for name, total in (("step", 0.08), ("boundary", 0.008), ("gpu_wait", 0.001)):
        series = f"sglang:kv_offload_{name}_seconds_"
        found = [REGISTRY.get_sample_value(series + x, labels) for x in ("count", "sum")]
        assert found == [2, pytest.approx(total)]
    most = {**labels, "le": "0.05"}
    assert REGISTRY.get_sample_value("sglang:kv_offload_step_seconds_bucket", most) == 2
