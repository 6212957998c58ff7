"""Alert rules and dashboard: made by the script from metrics that there are, with the alerts that the docs list."""

import json
import re
import shutil
import subprocess

import pytest

import monitoring
from sglang_scout.plugin.metrics import METRICS

METRICS_PAGE = monitoring.FOLDER.parent / "reference" / "metrics.md"
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
PUBLISHED = {name + suffix for name, (kind, _) in METRICS.items() for suffix in SUFFIXES[kind]}


@pytest.mark.parametrize(
    ("name", "made"),
    [("alerts.yml", monitoring.rules()), ("grafana.json", monitoring.dashboard())],
)
def test_files_are_what_the_script_writes_of_metrics_that_there_are(name, made):
    assert (monitoring.FOLDER / name).read_text() == made, "run scripts/monitoring.py"
    used = set(re.findall(r"kv_offload_(\w+)", made))
    assert used and used <= PUBLISHED


def test_each_alert_is_in_the_docs_with_what_to_do():
    text = METRICS_PAGE.read_text()
    for alert in monitoring.ALERTS:
        assert re.search(rf"^\| `{alert.name}` \| .* \| {re.escape(alert.says)} \|$", text, re.M)


def test_panels_have_places_of_their_own():
    panels = json.loads(monitoring.dashboard())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) == len(monitoring.PANELS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_prometheus_takes_the_rules():
    subprocess.run(["promtool", "check", "rules", monitoring.FOLDER / "alerts.yml"], check=True)
