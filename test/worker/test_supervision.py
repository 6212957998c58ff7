"""A worker that dies, hangs or is slow; a decode server that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from control_channel import ends, frames
from ring_view import CLOSED_ITEM, RingView
from sglang_scout.worker import messages as m
from sglang_scout.worker import process as process_module
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.process import WorkerProcess
from sglang_scout.worker.ring import HEADER_DTYPE

TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}  # fp32 sums over 200,000 tokens against float64

# A record that keeps one thread busy for a good part of a second: many pages, few of them distinct.
HEAVY = {"num_pages": 64, "page_size": 16, "head_dim": 64, "max_pages": 12_000, "max_batch": 16}


def check_served_again(client, out_and_lse, request, expected, until, step):
    """The next worker's answer is bit-identical."""
    until(lambda: client.ready, "restart", 10)
    out, lse = out_and_lse
    reply = client.wait(client.post(0, step, *request), out, lse)
    assert reply.fallback_pages == 0
    assert (out == expected[0]).all() and (lse == expected[1]).all()


def test_killed_in_mid_work(buffers, make_arena, make_request, oracle, cpu, until, gone):
    arena = make_arena(**HEAVY)
    small = make_request(arena.spec, 2, 1)
    small[2][:] = (3, 50)
    heavy = make_request(arena.spec, 16, 2, full=True)
    with WorkerClient(arena, [cpu]) as client:
        small_expected = buffers(arena, 2)
        client.wait(client.post(0, 0, *small), *small_expected)
        np.testing.assert_allclose(small_expected[0], oracle(arena, 0, *small)[0], **TOLERANCE)
        pid = client.snapshot().pid
        # Two layers in flight; the first is being computed when the worker dies.
        tickets = [client.post(layer, 0, *heavy) for layer in (1, 2)]
        until(lambda: client.snapshot().items > 2, "first items")
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for ticket in tickets:
            out, lse = buffers(arena, 16)
            reply = client.wait(ticket, out, lse)
            assert reply.fallback_pages == 16 * 12_000 and reply.waited_us < 8e6
            row = (heavy[0][5:6], heavy[1][5:6], heavy[2][5:6])
            expected = oracle(arena, ticket.layer, *row)
            np.testing.assert_allclose(out[5:6], expected[0], **TOLERANCE)
            np.testing.assert_allclose(lse[5:6], expected[1], **TOLERANCE)
            assert not np.isnan(out).any()
        check_served_again(client, buffers(arena, 2), small, small_expected, until, 2)
        status = client.snapshot()
        assert status.restarts == 1 and status.pid != pid and gone(pid)
        assert status.last_error == f"CPU attention process {pid} was killed by SIGKILL"
        assert status.fallback_pages == 2 * 16 * 12_000
        assert time.monotonic() - killed_s < 20


def test_stopped_worker_is_replaced(buffers, make_arena, make_request, cpu, until, gone, freeze):
    arena = make_arena()
    request = make_request(arena.spec, 4, 1, full=True)
    with WorkerClient(arena, [cpu]) as client:
        expected = buffers(arena, 4)
        client.wait(client.post(0, 0, *request), *expected)
        pid = client.snapshot().pid
        freeze(pid)
        out, lse = buffers(arena, 4)
        reply = client.wait(client.post(0, 1, *request), out, lse)
        assert 0.4e6 < reply.waited_us < 8e6  # the heartbeat timeout, not the wait's
        assert reply.fallback_pages == 32
        assert (out == expected[0]).all() and (lse == expected[1]).all()
        check_served_again(client, buffers(arena, 4), request, expected, until, 2)
        status = client.snapshot()
        assert status.restarts == 1 and status.late_tickets == 0 and gone(pid)
        assert "was silent for" in status.last_error


def test_worker_without_cpu_has_longer(make_arena, cpu, until, freeze, monkeypatch):
    """A silent worker that is starved, not hung: a replacement would be starved as well."""
    monkeypatch.setattr(WorkerProcess, "wants_cpu", lambda process: True)
    config = WorkerConfig(heartbeat_timeout_s=0.4, stall_timeout_s=1.5)
    with WorkerClient(make_arena(), [cpu], config=config) as client:
        pid = client.snapshot().pid
        freeze(pid)
        until(lambda: client.snapshot().restarts == 1, "restart")
        silent_s = float(re.search(r"silent for (\S+) s", client.snapshot().last_error)[1])
        assert silent_s >= 1.5
        # If silent for less than that, it is kept.
        until(lambda: client.ready, "the next worker")
        pid = client.snapshot().pid
        freeze(pid)
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        status = client.snapshot()
        assert (status.state, status.pid, status.restarts) == ("ready", pid, 1)


@pytest.mark.parametrize(
    ("command", "wants"),
    [
        (["-c", "print('spins', flush=True)\nwhile True: pass"], True),
        (["-c", "import time; print('waits', flush=True); time.sleep(600)"], False),
    ],
)
def test_whose_thread_is_busy(command, wants, until):
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        stub = SimpleNamespace(pid=process.pid)
        until(lambda: WorkerProcess.wants_cpu(stub) == wants, f"{wants}")
        found = [WorkerProcess.wants_cpu(stub) for _ in range(50) if time.sleep(0.002) is None]
        assert sum(found) > 40 if wants else sum(found) < 10, found
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not WorkerProcess.wants_cpu(stub), "it has ended"


def test_an_idle_worker_is_not_stalled(make_arena, cpu, freeze):
    """Silence is bounded by the heartbeat timeout, however long that is."""
    with WorkerClient(make_arena(), [cpu], config=WorkerConfig(heartbeat_timeout_s=30)) as client:
        pid = client.snapshot().pid
        freeze(pid)
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        status = client.snapshot()
        assert (status.state, status.pid, status.restarts) == ("ready", pid, 0)


def test_heartbeats_without_progress_are_not_enough(buffers, make_arena, make_request, cpu, until):
    """A record that takes longer than the timeouts per item: the worker counts as hung."""
    # Several times the timeout even on a fast CPU, where 16 tokens per page take 60 ms in all.
    arena = make_arena(**(HEAVY | {"page_size": 512, "max_pages": 300_000, "max_batch": 1}))
    heavy = make_request(arena.spec, 1, 2, full=True)
    config = WorkerConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.4, stall_timeout_s=0.1)
    with WorkerClient(arena, [cpu], config=config) as client:
        reply = client.wait(client.post(0, 0, *heavy), *buffers(arena, 1))
        assert reply.fallback_pages == 300_000
        assert "finished nothing" in client.snapshot().last_error
        until(lambda: client.ready, "restart")


def test_a_starved_supervisor_finds_a_stall_in_time(
    buffers, make_arena, make_request, cpu, until, freeze, monkeypatch
):
    """It runs once a second, as when a step holds the GIL on a busy machine. If a wait timed out first, a server with
    captured steps would be shut down."""
    wait = WorkerProcess.wait

    def starved(process, timeout_s, wake_fd):
        time.sleep(1.0)
        return wait(process, timeout_s, wake_fd)

    arena = make_arena()
    with WorkerClient(arena, [cpu]) as client:
        pid = client.snapshot().pid
        monkeypatch.setattr(WorkerProcess, "wait", starved)
        freeze(pid)
        ticket = client.post(0, 0, *make_request(arena.spec, 4, 1, full=True))
        RingView(arena).reply(0)["claim"][0] |= CLOSED_ITEM  # no item can be claimed
        os.kill(pid, signal.SIGCONT)
        reply = client.wait(ticket, *buffers(arena, 4))
        assert reply.fallback_pages == 32 and client.snapshot().late_tickets == 0
        until(lambda: "finished nothing" in client.snapshot().last_error, "restart")


def test_slow_worker_is_never_overtaken(
    buffers, make_arena, make_request, oracle, cpu, until, freeze
):
    """It is stopped, not dead: its slot is not reused, and its late answer is not misattributed."""
    arena = make_arena()
    config = WorkerConfig(wait_timeout_s=0.05, heartbeat_timeout_s=30, stall_timeout_s=30)
    requests = [make_request(arena.spec, 4, seed, full=True) for seed in range(4)]
    with WorkerClient(arena, [cpu], config=config) as client:
        pid = client.snapshot().pid
        freeze(pid)
        tickets = []
        for step, request in enumerate(requests[:3]):
            ticket = client.post(0, step, *request)
            tickets.append(ticket)
            out, lse = buffers(arena, 4)
            reply = client.wait(ticket, out, lse)
            assert reply.fallback_pages == 32
            np.testing.assert_allclose(out, oracle(arena, 0, *request)[0], **TOLERANCE)
        status = client.snapshot()
        assert status.local_tickets == 1  # step 2 found the slot of step 0 busy
        assert status.late_tickets == 2 and status.restarts == 0
        os.kill(pid, signal.SIGCONT)
        until(lambda: client.snapshot().items == 8, "the answers of the two posted")
        out, lse = buffers(arena, 4)
        reply = client.wait(client.post(0, 4, *requests[3]), out, lse)
        assert reply.fallback_pages == 0
        np.testing.assert_allclose(out, oracle(arena, 0, *requests[3])[0], **TOLERANCE)


def test_failed_starts_are_tried_again(buffers, make_arena, make_request, cpu, until, monkeypatch):
    arena = make_arena()
    config = WorkerConfig(backoff_min_s=0.01, backoff_max_s=0.02, max_start_failures=3, retry_s=0.1)
    with WorkerClient(arena, [cpu], config=config) as client:
        with monkeypatch.context() as patch:
            patch.setattr(process_module, "_spawn", lambda *_: subprocess.Popen(["false"]))
            os.kill(client.snapshot().pid, signal.SIGKILL)
            until(lambda: client.snapshot().state == "failed", "three failures")
            assert client.snapshot().restarts >= 3
            assert client.snapshot().last_error.endswith("ended with exit code 1")
            out, lse = buffers(arena, 4)
            ticket = client.post(0, 0, *make_request(arena.spec, 4, 1, full=True))
            assert client.wait(ticket, out, lse).fallback_pages == 32
        until(lambda: client.ready, "a worker that starts")


def test_a_damaged_header_costs_no_worker(make_arena, cpu, until):
    arena = make_arena()
    with WorkerClient(arena, [cpu]) as client:
        arena._mapped()[: HEADER_DTYPE.itemsize] = 0xFF
        os.kill(client.snapshot().pid, signal.SIGKILL)
        until(lambda: client.snapshot().restarts == 1 and client.ready, "the next worker")


def test_what_either_side_drops_is_counted(make_arena, cpu, until):
    with WorkerClient(make_arena(), [cpu]) as client:
        pid = client.snapshot().pid
        with ends(os.getpid(), pid) as (server, worker):
            server.sendall(frames(pid, b"no message"))
            worker.sendall(frames(pid, b"no message"))
            worker.sendall(frames(pid, m.encode(m.Hello()), token=b"of an earlier start"))
        until(lambda: client.snapshot().refused_messages == 3, "both counts")
        assert client.snapshot().restarts == 0


def test_what_is_posted_is_finished_before_a_stop(buffers, make_arena, make_request, cpu):
    arena = make_arena(**HEAVY)
    heavy = make_request(arena.spec, 4, 1, full=True)
    out, lse = buffers(arena, 4)
    with WorkerClient(arena, [cpu], config=WorkerConfig(stop_timeout_s=20)) as client:
        ticket = client.post(0, 0, *heavy)
    assert client.snapshot().state == "stopped" and client.snapshot().items == 4
    assert client.wait(ticket, out, lse).fallback_pages == 0


@pytest.mark.parametrize("folder", ["absent", "x" * 200])
def test_the_channel_needs_no_temporary_folder(make_arena, cpu, monkeypatch, tmp_path, folder):
    monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
    with WorkerClient(make_arena(), [cpu]) as client:
        assert client.snapshot().endpoint.startswith("ipc://@sglang-scout-")
    assert not list(tmp_path.iterdir())


PARENT = """
import os, signal, sys, time
import numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient
spec = ArenaSpec(num_layers=1, num_pages=40, page_size=4, num_kv_heads=2, num_q_heads=4,
                 head_dim=16, kv_dtype="float32", scale=0.25, max_batch=4, max_pages=8)
arena = Arena.create(spec)
client = WorkerClient(arena, [int(sys.argv[1])])
print(os.fstat(arena.fd).st_ino, flush=True)
client.start()
print(client.snapshot().pid, flush=True)
q = np.zeros((4, 4, 16), np.float32)
step = 0
while True:
    client.post(0, step, q, np.zeros((4, 8), np.int32), np.full(4, 8, np.int32))
    step += 1
"""


def run_parent(cpu: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(cpu)],
        stdout=subprocess.PIPE,
        text=True,
    )


def holders(inode: int) -> list[int]:
    """Processes that map the memory file of an arena."""
    found = []
    for process in psutil.process_iter():
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue
        if any("memfd:sglang-scout" in line and line.split()[4] == str(inode) for line in lines):
            found.append(process.pid)
    return found


@pytest.mark.parametrize("worker_stopped", [False, True])
def test_killed_decode_server_leaves_nothing(cpu, until, gone, freeze, worker_stopped):
    parent = run_parent(cpu)
    try:
        inode, pid = int(parent.stdout.readline()), int(parent.stdout.readline())
        assert set(holders(inode)) == {parent.pid, pid}
        if worker_stopped:
            freeze(pid)
    finally:
        parent.kill()
    until(lambda: gone(pid), "end of the worker", 20)
    parent.wait()
    assert holders(inode) == []


def test_decode_server_killed_while_the_worker_starts(cpu, until, gone):
    def workers() -> list[int]:
        found = []
        for process in psutil.Process(parent.pid).children():
            try:
                found += [process.pid] * ("sglang_scout.worker.main" in " ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    parent = run_parent(cpu)
    try:
        inode = int(parent.stdout.readline())
        until(lambda: workers() != [], "a worker's process")
        pids = workers()
    finally:
        parent.kill()
    parent.wait()
    for pid in pids:
        until(lambda pid=pid: gone(pid), "end of the worker", 20)
    assert holders(inode) == []
