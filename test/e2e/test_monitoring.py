"""A real Prometheus watches a decode server whose worker is killed: every panel has numbers, and the alert fires."""

import contextlib
import json
import os
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

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def prometheus(folder, target):
    """Its URL, while it scrapes ``target`` every second and evaluates the rules."""
    (port,) = free_ports(1)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{DOCS / 'monitoring' / 'alerts.yml'}]\n"
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


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus")
def test_panels_have_numbers_and_a_killed_worker_raises_an_alert(servers, tmp_path):
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

        wait_until("the first scrape", lambda: value("sglang:kv_offload_worker_up"), 30)
        servers.generate(random_prompts([700, 900]), max_new_tokens=60)
        for panel in json.loads((DOCS / "monitoring" / "grafana.json").read_text())["panels"]:
            for target in panel["targets"]:
                wait_until(target["expr"], lambda e=target["expr"]: value(e), 30)
        assert "ScoutWorkerRestarted" not in firing()
        os.kill(servers.kv_offload()["worker"]["pid"], signal.SIGKILL)
        wait_until("the alert", lambda: "ScoutWorkerRestarted" in firing(), 60)
