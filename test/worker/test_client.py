"""WorkerClient with a real worker process: answers, states, arguments, resources; a silent or slow process. Deaths
under load: test/e2e/test_worker_faults.py."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from ring_view import CLOSED_ITEM, RingView
from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import supervisor as supervisor_module
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.supervisor import WorkerProcess
from worker_cases import buffers, close, freeze, make_request, oracle, until


@pytest.mark.parametrize(("threads", "lists"), [(3, 1), (1, 2)])
def test_round_trips_match_the_oracle(make_arena, cpu, threads, lists):
    arena = make_arena(kv_dtype="bfloat16", lists=lists, max_batch=4 * lists)
    pages = 0
    with WorkerClient(arena, [cpu] * threads) as client:
        for step in range(8):
            for layer in range(arena.spec.num_layers):
                request = make_request(arena.spec, 1 + step % 4, 10 * step + layer, full=True)
                answer = buffers(arena, len(request[0]))
                reply = client.wait(client.post(layer, step, *request), *answer)
                close(answer, oracle(arena, layer, *request))
                assert reply.fallback_pages == 0 and reply.waited_us >= 0
                pages += request[1].size
        # Counted after the answer was published.
        until(lambda: client.snapshot().pages == pages, "every page in the totals")
        status = client.snapshot()
        assert (status.state, status.restarts, status.cpus) == ("ready", 0, (cpu,) * threads)
        assert status.items > 0 and status.busy_us >= 0
        assert status.fallback_pages == status.local_tickets == status.refused == 0
        assert status.isa and psutil.pid_exists(status.pid)
    after = client.snapshot()
    assert (after.state, after.pid, after.pages) == ("stopped", None, pages)


def test_before_start_and_after_stop_the_caller_computes(make_arena, cpu):
    arena = make_arena()
    request = make_request(arena.spec, 4, 1, full=True)
    expected = oracle(arena, 1, *request)
    client = WorkerClient(arena, [cpu])
    assert client.snapshot().state == "stopped"
    for step, fallback in enumerate((32, 0, 32, 0)):  # a stopped client can be restarted
        if not fallback:
            client.start()
        answer = buffers(arena, 4)
        assert client.wait(client.post(1, step, *request), *answer).fallback_pages == fallback
        close(answer, expected)
        client.stop()


def test_mistakes_are_named(make_arena, cpu):
    arena = make_arena()
    client = WorkerClient(arena, [cpu])
    q, pages, n_pages = make_request(arena.spec, 2, 1, full=True)
    no_match = "incompatible function arguments"  # of dtype or contiguity
    for layer, args, text in (
        (0, (q.astype(np.float64), pages, n_pages), no_match),
        (0, (q, np.asfortranarray(pages), n_pages), no_match),
        (0, (q[:, :3].copy(), pages, n_pages), r"q is \[2, 3, 16\], expected \[2, 4, 16\]"),
        (0, (q, pages[:1], n_pages), r"post: pages is \[1, 8\]"),
        (0, (q, pages, n_pages[:1]), "post: n_pages"),
        (0, (q, pages * 0 + 40, n_pages), r"post: page id 40 of row 0 is outside 0\.\.39"),
        (3, (q, pages, n_pages), "layer 3 is outside"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            client.post(layer, 0, *args)
    ticket = client.post(0, 0, q, pages, n_pages)
    out, lse = buffers(arena, 2)
    for args, text in (
        ((out, lse[:, :3].copy()), r"wait: lse is \[2, 3\]"),
        ((out[:1], lse[:1]), "wait: out has 1 rows, expected 2"),
        ((out.astype(np.float64), lse), no_match),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            client.wait(ticket, *args)
    client.wait(ticket, out, lse)
    with pytest.raises(WorkerError, match="used up"):
        client.wait(ticket, out, lse)


def test_bad_cpu_comes_back_as_the_worker_s_reason(make_arena):
    children = len(psutil.Process().children())
    client = WorkerClient(make_arena(), [1023])
    with pytest.raises(
        WorkerError,
        match=r"cannot start on CPUs 1023: .*; set --kv-offload-cpus to some of .*online are",
    ):
        client.start()
    assert client.snapshot().state == "failed"
    assert len(psutil.Process().children()) == children


def test_worker_that_exits_or_says_nothing(make_arena, cpu, monkeypatch):
    client = WorkerClient(make_arena(), [cpu], config=WorkerConfig(ready_timeout_s=1.0))
    for program, says in (
        ("exit(3)", "ended with exit code 3"),
        ("import time; time.sleep(60)", "was not ready within 1.0 s"),
    ):
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(supervisor_module, "_spawn", lambda *_, c=command: subprocess.Popen(c))
        with pytest.raises(WorkerError, match=rf"process \d+ {says}"):
            client.start()


def test_waiting_does_not_hold_the_gil(make_arena, cpu):
    """Another thread wakes the worker that is waited for."""
    arena = make_arena()
    config = WorkerConfig(wait_timeout_s=5, heartbeat_timeout_s=30)
    with WorkerClient(arena, [cpu], config=config) as client:
        pid = client.snapshot().pid
        freeze(pid)
        ticket = client.post(0, 0, *make_request(arena.spec, 4, 1, full=True))
        threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
        reply = client.wait(ticket, *buffers(arena, 4))
        assert reply.fallback_pages == 0 and reply.waited_us > 100_000


def test_idle_worker_sleeps(make_arena, cpu):
    arena = make_arena()
    with WorkerClient(arena, [cpu]) as client:
        client.wait(client.post(0, 0, *make_request(arena.spec, 4, 1)), *buffers(arena, 4))
        time.sleep(0.1)
        process = psutil.Process(client.snapshot().pid)
        before, own = sum(process.cpu_times()[:2]), time.process_time()
        time.sleep(0.6)
        assert sum(process.cpu_times()[:2]) - before < 0.05
        assert time.process_time() - own < 0.05  # the supervisor's share


def test_a_start_without_threads_is_refused(make_arena, cpu, monkeypatch):
    no_thread = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    fds = len(os.listdir("/proc/self/fd"))
    client = WorkerClient(make_arena(), [cpu])
    with pytest.raises(WorkerError, match="can't start new thread; raise"):
        client.start()
    client.stop()
    assert len(os.listdir("/proc/self/fd")) <= fds + 2, "the arena and its mapping"


def test_worker_without_cpu_has_longer(make_arena, cpu, monkeypatch):
    """A silent worker that is starved, not hung: a replacement would be starved as well."""
    monkeypatch.setattr(WorkerProcess, "wants_cpu", lambda process: True)
    config = WorkerConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2, stall_timeout_s=1.0)
    with WorkerClient(make_arena(), [cpu], config=config) as client:
        pid = client.snapshot().pid
        freeze(pid)
        time.sleep(0.5)
        assert (client.snapshot().pid, client.snapshot().restarts) == (pid, 0), "it is kept"
        until(lambda: client.snapshot().restarts == 1, "restart")
        silent_s = float(re.search(r"silent for (\S+) s", client.snapshot().last_error)[1])
        assert silent_s >= 1.0


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

    def starved(process, timeout_s):
        time.sleep(0.25)
        return wait(process, timeout_s)

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
            patch.setattr(supervisor_module, "_spawn", lambda *_: subprocess.Popen(["false"]))
            os.kill(client.snapshot().pid, signal.SIGKILL)
            until(lambda: client.snapshot().state == "failed", "three failures")
            until(lambda: client.snapshot().restart_backoff_seconds == 0.1, "the longest pause")
            assert client.snapshot().restarts >= 3
            assert client.snapshot().last_error.endswith("ended with exit code 1")
            ticket = client.post(0, 0, *make_request(arena.spec, 4, 1, full=True))
            assert client.wait(ticket, *buffers(arena, 4)).fallback_pages == 32
        until(lambda: client.snapshot().state == "ready", "a worker that starts")
        assert client.snapshot().restart_backoff_seconds == 0


def test_what_is_posted_is_finished_before_a_stop(make_arena, cpu):
    # One thread is busy for a good part of a second: with many pages, few of them distinct.
    arena = make_arena(num_pages=64, page_size=16, head_dim=64, max_pages=12_000)
    heavy = make_request(arena.spec, 4, 1, full=True)
    with WorkerClient(arena, [cpu], config=WorkerConfig(stop_timeout_s=20)) as client:
        ticket = client.post(0, 0, *heavy)
    assert client.snapshot().state == "stopped" and client.snapshot().items == 4
    assert client.wait(ticket, *buffers(arena, 4)).fallback_pages == 0
