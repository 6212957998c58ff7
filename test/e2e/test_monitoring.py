"""Monitoring of a decode server while its worker is killed: a real Prometheus, in which every panel has numbers and the
alert fires, and the dashboard in a real browser."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from harness import PDCluster, random_prompts, wait_until
from reference import DOCS
from servers.dashboard_process import dashboard
from servers.pd_cluster import HOST, flags
from servers.server_process import free_ports
from servers.sglang_http import RequestFailed, http_json

pytestmark = pytest.mark.slow


def needs(program):
    reason = f"no {program} (of Debian's package of this name)"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


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
        server_args=flags(kv_offload="scout", kv_offload_budget=128),
        decode_args=["--enable-metrics"],
        max_total_tokens=16384,
    ) as running:
        yield running


def kill_worker(servers):
    os.kill(servers.kv_offload()["worker"]["pid"], signal.SIGKILL)


@needs("prometheus")
def test_panels_have_numbers_and_a_killed_worker_raises_an_alert(servers, tmp_path):
    with prometheus(tmp_path, urllib.parse.urlsplit(servers.server_url("decode")).netloc) as url:

        def ask(path):
            with contextlib.suppress(OSError, RequestFailed):
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
        kill_worker(servers)
        wait_until("the alert", lambda: "ScoutWorkerRestarted" in firing(), 60)


async def _evaluate(port, script):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{HOST}:{port}/json") as answer:
            page = next(x for x in await answer.json() if x["type"] == "page")
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            await socket.send_json(
                {"id": 1, "method": "Runtime.evaluate", "params": {"expression": script}}
            )
            return (await socket.receive_json())["result"]["result"]["value"]


@contextlib.contextmanager
def browser(folder, url):
    """A function that evaluates JavaScript in the page, and returns a string."""
    (port,) = free_ports(1)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder}", f"--remote-debugging-port={port}", url]
    with (folder / "chromium.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield lambda script: asyncio.run(_evaluate(port, script))
    finally:
        process.terminate()
        process.wait(30)


@needs("chromium")
def test_the_dashboard_in_a_browser(servers, tmp_path):
    restarts = servers.kv_offload()["worker"]["restarts"]
    with (
        dashboard(servers.server_url("decode")) as url,
        browser(tmp_path, url) as evaluate,
        ThreadPoolExecutor(1) as load,
    ):

        def text():
            with contextlib.suppress(OSError, StopIteration):
                return evaluate("document.body?.innerText ?? ''")
            return ""

        def steps():
            found = re.search(r"([\d.]+)\s+steps per second", text())
            return found and float(found[1])

        wait_until("the page shows the worker", lambda: "CPU attention ready" in text(), 60)
        assert "scout, cpu-" in text() and "4 layers" in text()
        prompts = random_prompts([700, 900])
        answers = load.submit(servers.generate, prompts, max_new_tokens=400)
        wait_until("it shows steps", steps, 60)
        answers.result()
        wait_until("it shows that they have ended", lambda: steps() == 0, 60)
        # Every canvas has been drawn on.
        drawn = "[...document.querySelectorAll('canvas')].map(c => new Set(c.getContext('2d')"
        drawn += ".getImageData(0, 0, c.width, c.height).data).size > 2).join()"
        assert evaluate(drawn) == "true,true,true,true"
        kill_worker(servers)
        wait_until("it shows a new worker", lambda: f"restarts: {restarts + 1}," in text(), 60)
