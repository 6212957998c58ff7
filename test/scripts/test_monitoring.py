"""Alert rules and dashboard: of metrics that there are, each alert with its entry in the runbook."""

import json
import re
import shutil
import subprocess

import pytest

import monitoring
import reference
from sglang_scout.plugin.metrics import METRICS

FOLDER = reference.DOCS / "monitoring"
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
PUBLISHED = {name + suffix for name, (kind, _) in METRICS.items() for suffix in SUFFIXES[kind]}


@pytest.mark.parametrize("made", [monitoring.rules(), monitoring.dashboard()])
def test_rules_and_panels_are_of_metrics_that_there_are(made):
    used = set(re.findall(r"kv_offload_(\w+)", made))
    assert used and used <= PUBLISHED


def test_each_alert_links_to_its_entry_in_the_runbook():
    rules = (FOLDER / "alerts.yml").read_text()
    links = re.findall(r'runbook: "(.*?)#(.*)"', rules)
    assert len(links) == len(monitoring.ALERTS) == rules.count("- alert: ")
    for path, anchor in links:
        page = (reference.DOCS.parent / path).read_text()
        assert anchor in {title.lower() for title in re.findall(r"(?m)^### (\w+)$", page)}


def test_panels_have_places_of_their_own():
    panels = json.loads(monitoring.dashboard())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) == len(monitoring.PANELS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_prometheus_takes_the_rules():
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yml"], check=True)
