"""What a decode server makes of a silent or slow worker. Deaths under load: test/e2e/test_worker_faults.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ring_view import CLOSED_ITEM, RingView
from sglang_scout.worker import process as process_module
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.process import WorkerProcess
from worker_cases import buffers, freeze, make_request, until

# A record that keeps one thread busy for a good part of a second: many pages, few of them distinct.
HEAVY = {"num_pages": 64, "page_size": 16, "head_dim": 64, "max_pages": 12_000, "max_batch": 16}


def test_worker_without_cpu_has_longer(make_arena, cpu, monkeypatch):
    """A silent worker that is starved, not hung: a replacement would be starved as well."""
    monkeypatch.setattr(WorkerProcess, "wants_cpu", lambda process: True)
    config = WorkerConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2, stall_timeout_s=1.0)
    with WorkerClient(make_arena(), [cpu], config=config) as client:
        pid = client.snapshot().pid
        freeze(pid)
        until(lambda: client.snapshot().restarts == 1, "restart")
        silent_s = float(re.search(r"silent for (\S+) s", client.snapshot().last_error)[1])
        assert silent_s >= 1.0
        # If silent for less than that, it is kept.
        until(lambda: client.snapshot().state == "ready", "the next worker")
        pid = client.snapshot().pid
        freeze(pid)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        status = client.snapshot()
        assert (status.state, status.pid, status.restarts) == ("ready", pid, 1)


@pytest.mark.parametrize(("does", "wants"), [("while True: pass", True), ("input()", False)])
def test_whose_thread_is_busy(does, wants):
    program = [sys.executable, "-c", f"print(flush=True)\n{does}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, **pipes) as process:
        process.stdout.readline()
        stub = SimpleNamespace(pid=process.pid)
        until(lambda: WorkerProcess.wants_cpu(stub) == wants, f"{wants}")
        found = [WorkerProcess.wants_cpu(stub) for _ in range(50) if time.sleep(0.002) is None]
        process.kill()
    assert sum(found) > 40 if wants else sum(found) < 10, found
    assert not WorkerProcess.wants_cpu(stub), "it has ended"


def test_a_starved_supervisor_finds_a_stall_in_time(make_arena, cpu, monkeypatch):
    """It runs at every fifth heartbeat, as when a step holds the GIL. If a wait timed out first, a server with captured
    steps would be shut down."""
    wait = WorkerProcess.wait

    def starved(process, timeout_s, *wake_fds):
        time.sleep(0.25)
        return wait(process, timeout_s, *wake_fds)

    arena = make_arena()
    config = WorkerConfig(heartbeat_interval_s=0.05, stall_timeout_s=0.8, wait_timeout_s=3.0)
    with WorkerClient(arena, [cpu], config=config) as client:
        pid = client.snapshot().pid
        monkeypatch.setattr(WorkerProcess, "wait", starved)
        freeze(pid)
        ticket = client.post(0, 0, *make_request(arena.spec, 4, 1, full=True))
        RingView(arena).reply(0)["claim"][0] |= CLOSED_ITEM  # no item can be claimed
        os.kill(pid, signal.SIGCONT)
        reply = client.wait(ticket, *buffers(arena, 4))
        assert reply.fallback_pages == 32 and client.snapshot().late_tickets == 0
        until(lambda: "finished nothing" in client.snapshot().last_error, "restart")


def test_failed_starts_are_tried_again(make_arena, cpu, monkeypatch):
    arena = make_arena()
    config = WorkerConfig(backoff_min_s=0.01, backoff_max_s=0.02, max_start_failures=3, retry_s=0.1)
    with WorkerClient(arena, [cpu], config=config) as client:
        with monkeypatch.context() as patch:
            patch.setattr(process_module, "_spawn", lambda *_: subprocess.Popen(["false"]))
            os.kill(client.snapshot().pid, signal.SIGKILL)
            until(lambda: client.snapshot().state == "failed", "three failures")
            assert client.snapshot().restarts >= 3
            assert client.snapshot().last_error.endswith("ended with exit code 1")
            ticket = client.post(0, 0, *make_request(arena.spec, 4, 1, full=True))
            assert client.wait(ticket, *buffers(arena, 4)).fallback_pages == 32
        until(lambda: client.snapshot().state == "ready", "a worker that starts")


def test_what_is_posted_is_finished_before_a_stop(make_arena, cpu):
    arena = make_arena(**HEAVY)
    heavy = make_request(arena.spec, 4, 1, full=True)
    with WorkerClient(arena, [cpu], config=WorkerConfig(stop_timeout_s=20)) as client:
        ticket = client.post(0, 0, *heavy)
    assert client.snapshot().state == "stopped" and client.snapshot().items == 4
    assert client.wait(ticket, *buffers(arena, 4)).fallback_pages == 0
