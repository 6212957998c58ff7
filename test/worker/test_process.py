"""The control socket against a peer that misbehaves: here the test plays the worker."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
import time

import msgspec
import pytest
import zmq

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m
from sglang_scout.worker import process as process_module
from sglang_scout.worker.process import WorkerProcess, owner_name, sweep_directories


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def wake_fd():
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def process(make_arena, context, monkeypatch, tmp_path):
    """A process whose process only sleeps; `endpoint` is where a worker would connect."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    endpoints: list[str] = []

    def spawn(endpoint: str, *_: object) -> subprocess.Popen:
        endpoints.append(endpoint)
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(process_module, "_spawn", spawn)
    process = WorkerProcess(5, make_arena().fd, context, logging.getLogger("test"))
    process.endpoint = endpoints[0]
    yield process
    process.end()


def connect(context: zmq.Context, endpoint: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.connect(endpoint)
    return socket


def receive(process: WorkerProcess, wake_fd: int, count: int) -> list[m.Message]:
    """Waits until `count` messages came or were refused."""
    received: list[m.Message] = []
    deadline_s = time.monotonic() + 5
    before = process.refused_messages
    while len(received) + process.refused_messages - before < count:
        assert time.monotonic() < deadline_s, "message lost"
        received += process.wait(0.05, wake_fd)[0]
    return received


def test_directory_is_private_and_goes_with_the_hello(process, context, wake_fd, tmp_path):
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and owner_name() in folder.name
    peer = connect(context, process.endpoint)
    hello = m.Hello(token=process.token, pid=process.pid, epoch=5)
    peer.send(m.encode(hello))
    assert receive(process, wake_fd, 1) == [hello]
    assert list(tmp_path.iterdir()) == []
    process.send(m.Stop(token=process.token))  # the connection goes on without a name
    assert peer.poll(5000)
    assert m.decode(peer.recv(), m.FromClient, process.token) == m.Stop(token=process.token)


def test_strangers_are_refused_counted_and_do_not_block(process, context, wake_fd):
    stranger, worker = connect(context, process.endpoint), connect(context, process.endpoint)
    good = m.Hello(token=process.token, pid=process.pid, epoch=5)
    bad = [
        m.encode(msgspec.structs.replace(good, token="0" * 32)),
        m.encode(msgspec.structs.replace(good, version=9)),
        m.encode(msgspec.structs.replace(good, epoch=4)),
        m.encode(msgspec.structs.replace(good, pid=1)),
        m.encode(m.Ready(token=process.token, isa="", threads=1)),  # before any hello
        b"\x00" * (m.MAX_MESSAGE_BYTES + 1),
        b"noise",
    ]
    for data in bad:
        stranger.send(data)
    stranger.send_multipart([m.encode(good), b""])
    assert receive(process, wake_fd, len(bad) + 1) == []
    assert process.refused_messages == len(bad) + 1
    worker.send(m.encode(good))
    assert receive(process, wake_fd, 1) == [good]
    stranger.send(m.encode(m.Heartbeat(token=process.token, number=1, stats=m.Stats())))
    worker.send(m.encode(good))  # a second hello
    assert receive(process, wake_fd, 2) == []


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


def test_failing_spawn_leaves_nothing(make_arena, context, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    fd = make_arena().fd
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerError, match="cannot start the worker process: .*No such file"):
        WorkerProcess(1, fd, context, logging.getLogger("test"))
    assert list(tmp_path.iterdir()) == []
    context.destroy(linger=0)
    assert len(os.listdir("/proc/self/fd")) <= count


def test_long_temporary_directory_is_named(make_arena, context, monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(WorkerError, match="too long; set TMPDIR"):
        WorkerProcess(1, make_arena().fd, context, logging.getLogger("test"))
    assert list(deep.iterdir()) == []


def test_sweep_takes_only_what_dead_owners_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace, pid, ticks = (int(number, 16) for number in owner_name().split("-"))
    dead = [f"{namespace:x}-{pid:x}-{ticks + 1:x}", f"{namespace:x}-400000-1"]
    alive = [owner_name(), f"{namespace + 1:x}-400000-1"]
    for name in dead + alive:
        (tmp_path / f"sglang-scout-{name}-xyz").mkdir()
    (tmp_path / f"sglang-scout-{dead[0]}-xyz" / "control").touch()
    (tmp_path / f"sglang-scout-{dead[1]}-link").symlink_to(tmp_path)
    (tmp_path / "sglang-scout-notes").mkdir()
    assert sweep_directories() == 2
    left = {p.name for p in tmp_path.iterdir()}
    expected = {f"sglang-scout-{name}-xyz" for name in alive}
    assert left == expected | {f"sglang-scout-{dead[1]}-link", "sglang-scout-notes"}
