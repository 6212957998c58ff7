"""A real Prometheus watches a decode server whose worker is killed, and then the server: every panel has numbers, and
the alerts fire; promtool evaluates the others over hours."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse

import pytest

from harness import SCOUT, PDCluster, random_prompts, wait_until
from reference import DOCS
from servers.group import HOST, flags
from servers.server_process import free_ports
from servers.sglang_http import NO_ANSWER, http_json

ONE_SERIES = '{__name__=~"sglang[:_]kv_offload_worker_up"}'
RULES = DOCS / "monitoring" / "alerts.yml"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus")


@contextlib.contextmanager
def prometheus(folder, target):
    """Its URL, while it scrapes ``target`` every second and evaluates the rules."""
    (port,) = free_ports(1)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{RULES}]\n"
        f"scrape_configs: [{{job_name: decode, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={HOST}:{port}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{HOST}:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def servers(tiny_model):
    with PDCluster(
        tiny_model("qwen3"),
        {"decode": ["--enable-metrics"]},
        server_args=SCOUT + flags(max_total_tokens=16384),
    ) as running:
        yield running


@needs_prometheus
@pytest.mark.slow
def test_panels_have_numbers_and_a_killed_worker_and_server_raise_alerts(servers, tmp_path):
    with prometheus(tmp_path, urllib.parse.urlsplit(servers.server_url("decode")).netloc) as url:

        def ask(path):
            with contextlib.suppress(*NO_ANSWER):
                return http_json(url + path)["data"]
            return None

        def value(expression):
            found = ask("/query?" + urllib.parse.urlencode({"query": expression}))
            return found["result"] if found else None

        def firing():
            alerts = (ask("/alerts") or {"alerts": []})["alerts"]
            return {x["labels"]["alertname"] for x in alerts}

        wait_until("the first scrape", lambda: value(ONE_SERIES), 30)
        servers.generate(random_prompts([700, 900]), max_new_tokens=60)
        for panel in json.loads((DOCS / "monitoring" / "grafana.json").read_text())["panels"]:
            for target in panel["targets"]:
                expression = re.sub(r"\$(model|instance)", ".+", target["expr"])
                expression = expression.replace("$__rate_interval", "1m")
                wait_until(expression, lambda e=expression: value(e), 30)
        assert "ScoutWorkerRestarted" not in firing()
        os.kill(servers.kv_offload()["worker"]["pid"], signal.SIGKILL)
        wait_until("the alert", lambda: "ScoutWorkerRestarted" in firing(), 60)
        assert "ScoutServerDown" not in firing()
        servers.servers["decode"].signal(signal.SIGKILL)
        wait_until("the other alert", lambda: "ScoutServerDown" in firing(), 120)


HEALTHY = {
    "up": "1x20",
    "info": "1x20",
    "worker_up": "1x20",
    "worker_restarts_total": "1x20",
    "fallback_pages_total": "5x20",
    "checksum_failures_total": "0x20",
    "host_pages_capacity": "100x20",
    "host_pages_used": "50x20",
    "selected_pages_total": "0+100x20",
    "cpu_pages_total": "0+10x20",
    "step_seconds_sum": "0+50x20",
    "gpu_wait_seconds_sum": "0+1x20",
}
"""Values in each minute, in promtool's notation."""


@needs_prometheus
@pytest.mark.parametrize(
    ("alert", "series"),
    [
        (None, {}),
        ("ScoutServerDown", {"up": "1x5 0x15", "info": "1x5 stale"}),
        ("ScoutServerDown", {"up": "stale", "info": "stale"}),
        ("ScoutWorkerDown", {"worker_up": "1x5 0x15"}),
        ("ScoutWorkerRestarted", {"worker_restarts_total": "1x17 2x3"}),
        ("ScoutFallback", {"fallback_pages_total": "0+5x20"}),
        ("ScoutChecksumFailure", {"checksum_failures_total": "0x15 1x5"}),
        ("ScoutHostPagesFull", {"host_pages_used": "96x20"}),
        ("ScoutCpuShareHigh", {"cpu_pages_total": "0+30x20"}),
        ("ScoutWaits", {"gpu_wait_seconds_sum": "0+6x20"}),
    ],
)
def test_only_the_alert_that_should_fires(tmp_path, alert, series):
    labels = 'job="j", instance="i", model_name="m", tp_rank="0"'
    given = [
        {"series": f"{'' if name == 'up' else 'sglang:kv_offload_'}{name}{{{labels}}}", "values": x}
        for name, x in (HEALTHY | series).items()
    ]
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    asked = {"expr": firing, "eval_time": "20m", "exp_samples": expected}
    case = {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [str(RULES)], "tests": [case]}))
    subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], check=True)
