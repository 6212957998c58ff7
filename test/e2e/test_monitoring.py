"""A real Prometheus that scrapes a decode server: every panel has numbers, and a killed worker raises its alert."""

import contextlib
import os
import shutil
import signal
import subprocess
import urllib.parse

import pytest

import monitoring
from harness import PDCluster, random_prompts, wait_until
from servers.pd_cluster import HOST, flags
from servers.server_process import free_ports
from servers.sglang_http import http_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus (Debian: prometheus)"
    ),
]


@contextlib.contextmanager
def prometheus(folder, target):
    """Its URL, while it scrapes ``target`` every second and evaluates the rules."""
    (port,) = free_ports(1)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{monitoring.FOLDER / 'alerts.yml'}]\n"
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


def test_panels_have_numbers_and_a_killed_worker_raises_an_alert(tiny_model, tmp_path):
    with PDCluster(
        tiny_model("qwen3"),
        server_args=flags(kv_offload="scout", kv_offload_budget=128),
        decode_args=["--enable-metrics"],
        max_total_tokens=16384,
    ) as servers:
        target = urllib.parse.urlsplit(servers.server_url("decode")).netloc
        with prometheus(tmp_path, target) as url:

            def ask(path):
                with contextlib.suppress(OSError):
                    return http_json(url + path)["data"]
                return None

            def value(expression):
                found = ask("/query?" + urllib.parse.urlencode({"query": expression}))
                return found["result"] if found else None

            def firing():
                return {
                    x["labels"]["alertname"] for x in (ask("/alerts") or {"alerts": []})["alerts"]
                }

            wait_until("the first scrape", lambda: value(monitoring.metric("worker_up")), 30)
            servers.generate(random_prompts([700, 900]), max_new_tokens=60)
            for panel in monitoring.PANELS:
                for _, expression in panel.series:
                    wait_until(expression, lambda e=expression: value(e), 30)
            assert "ScoutWorkerRestarted" not in firing()
            os.kill(servers.kv_offload()["worker"]["pid"], signal.SIGKILL)
            wait_until("the alert", lambda: "ScoutWorkerRestarted" in firing(), 60)
