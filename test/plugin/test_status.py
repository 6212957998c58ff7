"""/metrics against /server_info: the same numbers, under the documented names."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from sglang_scout.engine.stores import Counters, StepTimes
from sglang_scout.plugin import status

PROMISED = [
    name
    for name, stat in status.METRICS.items()
    if stat.kind != "histogram" and not name.startswith("worker_") and name != "recall_wait_seconds"
]
STATE = {name: number for number, name in enumerate(PROMISED, 2)}
STATE |= {"recall_wait_us": 8, "worker": {"state": "ready", "restarts": 4}}


def sample(name, **labels):
    labels |= {"model_name": "m", "engine_type": "decode", "tp_rank": "0", "pp_rank": "0"}
    return REGISTRY.get_sample_value(f"sglang:kv_offload_{name}", labels)


def test_metrics_have_the_numbers_of_the_state_and_each_step_once(monkeypatch):
    monkeypatch.setattr(status, "decode_state", lambda backend: STATE.copy())
    monkeypatch.setattr(status, "PUBLISH_INTERVAL_S", 3600.0)
    parts = SimpleNamespace(counters=Counters(1))
    backend = SimpleNamespace(engine=SimpleNamespace(parts=parts), ranks=SimpleNamespace(rank=0))
    args = SimpleNamespace(served_model_name="m", extra_metric_labels=None)
    metrics = status.Metrics(backend, args)
    expected = {name: STATE[name] for name in PROMISED}
    expected |= {"recall_wait_seconds": 8e-6, "worker_restarts": 4, "worker_up": 1}
    parts.counters.times += StepTimes(0.03, 0.004, 0.0), StepTimes(0.05, 0.004, 0.001)
    for _ in range(2):  # nothing is counted twice
        metrics.publish()
        kinds = {name: "_total" * (status.METRICS[name].kind == "counter") for name in expected}
        assert {name: sample(name + kinds[name]) for name in expected} == expected
        for name, total in (("step", 0.08), ("boundary", 0.008), ("gpu_wait", 0.001)):
            found = [sample(f"{name}_seconds_{x}") for x in ("count", "sum")]
            assert found == [2, pytest.approx(total)]
    assert sample("step_seconds_bucket", le="0.05") == 2
    metrics.close()
