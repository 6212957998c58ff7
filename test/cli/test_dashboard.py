"""The dashboard's numbers from two states, and its page and events over HTTP."""

import contextlib
import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from servers.group import HOST, flags
from servers.server_process import ServerProcess, free_ports, wait_healthy
from servers.sglang_http import DIRECT
from sglang_scout.cli import dashboard, main
from sglang_scout.cli.dashboard import Poller, view

WORKER = {"pid": 5, "state": "ready", "restarts": 0, "last_error": "", "pages": 50, "cpus": [0, 1]}
COUNTERS = {"gpu_wait_us": 1000, "recall_wait_us": 0, "recall_bytes": 5000, "fallback_pages": 0}
STATE = COUNTERS | {
    "policy": "scout",
    "backend": "cpu-avx2",
    "budget_tokens": 64,
    "page_size": 32,
    "host_pages_total": 100,
    "host_pages_used": 30,
    "resident_slots": 40,
    "resident_pages_by_layer": [12, 7],
    "copying_pages_by_layer": [0, 3],
    "steps": 10,
    "budget_pages": 80,
    "cpu_compute_ratio_by_layer": [0.5, 0.25],
    "plan": [{"what": "host pages", "count": 100, "bytes": 200 * 512}],
    "recall": {"mode": "adaptive", "threshold": 0.12},
    "worker": WORKER,
}
LATER = STATE | {"steps": 20, "budget_pages": 160}  # after ten more steps of two requests


def test_rates_are_of_the_time_between():
    now = LATER | {"gpu_wait_us": 501000, "recall_bytes": 9000}
    now |= {"cpu_compute_ratio_by_layer": [0.25, 0.25], "worker": WORKER | {"pages": 150}}
    shown = view(STATE, now, 2.0)
    assert shown["cpu_ratio"] == [0.0, 0.25]  # 0.5 of the first half, 0.25 of all
    assert shown["steps_per_s"] == 5 and shown["wait_share"] == 0.25
    assert shown["requests"] == 2 and shown["recall_bytes_per_s"] == 2000
    assert shown["worker_bytes_per_s_core"] == 100 * 512 / 2 / 2
    assert shown["slots"] == 20 and shown["threshold"] == 0.12
    assert shown["resident"] == [12, 7] and shown["copying"] == [0, 3]


def test_a_new_worker_and_a_new_server_begin_at_zero():
    shown = view(STATE, STATE, 1.0)
    assert shown["cpu_ratio"] == [None, None] and shown["requests"] == shown["steps_per_s"] == 0
    worker = WORKER | {"pages": 4, "restarts": 1}
    assert view(STATE, LATER | {"worker": worker}, 1.0)["worker_bytes_per_s_core"] == 0
    shown = view(STATE, LATER | {"steps": 5, "budget_pages": 20}, 1.0)
    assert shown["steps_per_s"] == 5 and shown["cpu_ratio"] == [0.5, 0.25]


KEY = "secret"


@contextlib.contextmanager
def decode_server(answer, key=None):
    """Answers ``/server_info`` with ``answer()``, given the key if there is one; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(answer()).encode()
            allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if self.path == "/server_info" and allowed else 401)
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_page_and_its_numbers(tmp_path):
    answer = Mock(return_value={"internal_states": [{"kv_offload": STATE}]})
    [port], log = free_ports(1), tmp_path / "log"
    url = f"http://{HOST}:{port}"
    with decode_server(answer) as decode_url, contextlib.ExitStack() as stack:
        options = flags(json=True, decode=decode_url, port=port)
        command = [str(Path(sys.executable).with_name("sglang-scout")), "dashboard", *options]
        program = ServerProcess("dashboard", command, os.environ, log)
        program.start()
        stack.callback(program.wait, 30)
        stack.callback(program.signal, signal.SIGINT)
        wait_healthy(program, url, time.monotonic() + 60)
        assert json.loads(log.read_text()) == {"url": url}
        text = DIRECT.open(url).read().decode()
        assert 'fetch("view")' in text and "://" not in text, "it needs nothing from elsewhere"
        for _ in range(20):
            assert json.load(DIRECT.open(url + "/view", timeout=20))["resident"] == [12, 7]
        assert 0 < answer.call_count < 20, "a poll serves several viewers"
    assert program.exit_code is not None, "an interrupt ends it"


def said(url):
    """The error that the page shows."""
    return Poller(url).view()["error"]


@pytest.mark.parametrize(
    "answer",
    [{}, [], {"internal_states": [{}]}, {"internal_states": [{"kv_offload": {"policy": "scout"}}]}],
)
def test_what_is_no_decode_server_is_named(answer):
    with decode_server(lambda: answer) as url:
        assert f"{url} is not a decode server with --kv-offload; give" in said(url)


def test_the_key_is_sent_and_asked_for(monkeypatch):
    with decode_server(lambda: {"internal_states": [{"kv_offload": STATE}]}, KEY) as url:
        monkeypatch.setenv("SCOUT_API_KEY", "another")
        assert f"{url} needs its --api-key; set SCOUT_API_KEY" in said(url)
        monkeypatch.setenv("SCOUT_API_KEY", KEY)
        assert Poller(url).view()["resident"] == [12, 7]


def test_why_there_is_no_answer_is_said_in_words(monkeypatch):
    [port] = free_ports(1)
    assert "refuses connections; start the decode server" in said(f"http://{HOST}:{port}")
    assert "does not know; correct --decode" in said("http://no-such-host.invalid:1")
    assert "cannot be reached (nonnumeric port" in said(f"http://{HOST}:port")
    monkeypatch.setattr(dashboard, "TIMEOUT_S", 0.2)
    with decode_server(lambda: time.sleep(1.0)) as url:
        assert "has not answered in 0.2 s; check" in said(url)


def test_what_is_no_url_is_refused(capsys):
    assert main(["dashboard", "--decode", "localhost:30001"]) == 2
    assert "'localhost:30001': not a URL" in capsys.readouterr().err
