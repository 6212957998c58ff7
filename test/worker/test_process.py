"""The control socket against a misbehaving peer: the test plays the worker."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m
from sglang_scout.worker import process as process_module
from sglang_scout.worker.process import WorkerProcess

LOG = logging.getLogger("test")


@pytest.fixture
def wake_fd():
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def process(make_arena, monkeypatch):
    """A process that only sleeps; `peer` is the worker's end of its socket."""
    peers: list[socket.socket] = []

    def spawn(control_fd: int, *_: object) -> subprocess.Popen:
        peers.append(socket.socket(fileno=os.dup(control_fd)))
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(process_module, "_spawn", spawn)
    process = WorkerProcess(5, make_arena().fd, LOG)
    process.peer = peers[0]
    yield process
    process.end()
    peers[0].close()


def test_bad_messages_are_refused_and_counted(process, wake_fd):
    good = m.Hello(pid=process.pid, epoch=5)
    bad = [
        m.encode(msgspec.structs.replace(good, version=9)),
        m.encode(msgspec.structs.replace(good, epoch=4)),
        m.encode(msgspec.structs.replace(good, pid=1)),
        b"\x00" * (m.MAX_MESSAGE_BYTES + 1),
        b"noise",
    ]
    for data in [*bad, m.encode(good)]:
        process.peer.send(data)
    assert process.wait(5, wake_fd) == ([good], False)
    assert process.refused_messages == len(bad)
    process.send(m.Stop())
    assert m.decode(process.peer.recv(1 << 17), m.FromClient) == m.Stop()


def test_a_worker_that_closes_its_end_is_not_polled(process, wake_fd):
    process.peer.send(m.encode(m.Failed(error="last words")))
    process.peer.close()
    assert process.wait(5, wake_fd) == ([m.Failed(error="last words")], False)
    begin_s = time.monotonic()
    assert process.wait(0.2, wake_fd) == ([], False)
    assert time.monotonic() - begin_s > 0.15
    process.send(m.Stop())  # nobody reads it


def test_a_worker_that_does_not_read_does_not_block(process):
    for _ in range(10_000):
        process.send(m.Stop())


def test_end_of_the_process_is_noticed_at_once(process, wake_fd, gone):
    assert process.wait(0.01, wake_fd) == ([], False)
    os.kill(process.pid, 9)
    begin_s = time.monotonic()
    assert process.wait(5.0, wake_fd) == ([], True)
    assert time.monotonic() - begin_s < 4.5, "not the end of the wait"
    assert process.exit_text() == f"worker {process.pid} was killed by SIGKILL"
    process.end()
    process.end()
    assert gone(process.pid)


def test_failing_spawn_leaves_nothing(make_arena, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    fd = make_arena().fd
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerError, match="cannot start the worker process: .*No such file"):
        WorkerProcess(1, fd, LOG)
    assert len(os.listdir("/proc/self/fd")) == count
