"""/metrics against /server_info: the same numbers, under the documented names."""

import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest

from reference import DOCS
from sglang_scout.engine.stores import Counters
from sglang_scout.plugin import status

RENAMED = {
    "page_size_tokens": "page_size",
    "host_pages_capacity": "host_pages_total",
    "resident_pages_capacity": "resident_slots",
}
ONLY_METRICS = ["info", "recall_wait_seconds", "predicted_query_cosine"]
SAME = [
    name
    for name, stat in status.METRICS.items()
    if stat.kind != "histogram" and not name.startswith("worker_") and name not in ONLY_METRICS
]
STATE = {RENAMED.get(name, name): number for number, name in enumerate(SAME, 2)}
OF_WORKER = {"restarts": 4, "late_tickets": 3, "restart_backoff_seconds": 0.5}
STATE |= {"recall_wait_us": 8, "worker": OF_WORKER | {"state": "ready"}}
STATE |= {"query_cosine_by_layer": [None, 0.75, 1.0]}
STATE |= {name: f"its {name}" for name in status.INFO}
STATE["recall"] = {"mode": "its recall"}


def sample(name, **labels):
    labels |= {"model_name": "m", "engine_type": "decode", "tp_rank": "0", "pp_rank": "0"}
    return REGISTRY.get_sample_value(f"sglang:kv_offload_{name}", labels)


@pytest.fixture(scope="module")
def metrics():
    patch = pytest.MonkeyPatch()
    patch.setattr(status, "decode_state", lambda backend: STATE.copy())
    patch.setattr(status, "PUBLISH_INTERVAL_S", 3600.0)
    parts = SimpleNamespace(counters=Counters(1))
    backend = SimpleNamespace(engine=SimpleNamespace(parts=parts), ranks=SimpleNamespace(rank=0))
    args = SimpleNamespace(served_model_name="m", extra_metric_labels=None)
    made = status.Metrics(backend, args)
    yield made
    made.close()
    patch.undo()


def test_metrics_have_the_numbers_of_the_state_and_each_step_once(metrics):
    engine = metrics._backend.engine
    expected = {name: STATE[RENAMED.get(name, name)] for name in SAME}
    expected |= {"recall_wait_seconds": 8e-6, "worker_up": 1, "predicted_query_cosine": 0.875}
    expected |= {f"worker_{name}": number for name, number in OF_WORKER.items()}
    engine.parts.counters.observe(step_seconds=0.03, boundary_seconds=0.004, gpu_wait_seconds=0.0)
    engine.parts.counters.observe(step_seconds=0.05, boundary_seconds=0.004, gpu_wait_seconds=1e-3)
    for _ in range(2):  # nothing is counted twice
        metrics.publish()
        kinds = {name: "_total" * (status.METRICS[name].kind == "counter") for name in expected}
        assert {name: sample(name + kinds[name]) for name in expected} == expected
        for name, total in (("step", 0.08), ("boundary", 0.008), ("gpu_wait", 0.001)):
            found = [sample(f"{name}_seconds_{x}") for x in ("count", "sum")]
            assert found == [2, pytest.approx(total)]
    assert sample("step_seconds_bucket", le="0.05") == 2
    about = {name: f"its {name}" for name in status.INFO}
    assert sample("info", **about) == 1
    assert engine.compare_next, "a next step measures the cosine"


def test_a_cosine_that_was_never_measured_is_no_number():
    values = status._values(STATE | {"query_cosine_by_layer": [None, None]})
    assert math.isnan(values["predicted_query_cosine"])


def test_every_panel_is_of_the_chosen_models_and_instances():
    panels = json.loads((DOCS / "monitoring" / "grafana.json").read_text())["panels"]
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        chosen = re.findall(r"\{__name__=[^}]*\}", expression)
        assert chosen and len(chosen) == expression.count("__name__")
        for series in chosen:
            assert series.endswith('", model_name=~"$model", instance=~"$instance"}'), series


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_names_follow_the_rules_of_prometheus(metrics):
    metrics.publish()
    # SGLang's prefix has a colon.
    text = generate_latest().decode().replace("sglang:kv_offload", "sglang_kv_offload")
    lines = [line for line in text.splitlines() if "kv_offload" in line and "_created" not in line]
    said = subprocess.run(
        ["promtool", "check", "metrics"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    assert (said.returncode, said.stderr) == (0, "")
