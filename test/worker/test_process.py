"""Control messages, and the channel against a misbehaving peer: the test plays the CPU attention process."""

import os
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
import zmq

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import channel as m
from sglang_scout.worker import supervisor as supervisor_module
from sglang_scout.worker.channel import Channel
from sglang_scout.worker.supervisor import WorkerProcess
from worker_cases import until


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def process(make_arena, context, monkeypatch):
    """A process that only sleeps; `peer` is its end of the channel, in the test's process."""

    def spawn(channel: Channel, *_: object) -> subprocess.Popen:
        for name, value in channel.environment().items():
            monkeypatch.setenv(name, value)
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(supervisor_module, "_spawn", spawn)
    process = WorkerProcess(context, 5, make_arena().fd)
    process.channel.peer_pid = os.getpid()
    process.peer = Channel.bind(context, os.getpid())
    process.channel.send(m.Stop())  # the server speaks first
    assert heard(process.peer, 1) == [m.Stop()]
    yield process
    process.end()
    process.peer.close()


def heard(channel: Channel, count: int, timeout_s: float = 5.0) -> list[m.Message]:
    found, deadline_s = [], time.monotonic() + timeout_s
    while len(found) < count and (left_s := deadline_s - time.monotonic()) > 0:
        found += channel.receive(left_s)[0]
    return found


def test_the_largest_messages_are_below_the_cap():
    assert m.encode(m.Failed(error="ü" * m.MAX_TEXT_CHARS))
    cpus = dict.fromkeys(("cpus", "cpu_nodes", "background_cpus"), [*range(4096)])
    assert m.encode(m.Configure(max_threads=8, config=m.WorkerConfig(), **cpus))


def test_bad_messages_are_refused_and_counted(process):
    socket, [address] = process.peer._socket, process.peer._address
    token = process.peer._token
    good = m.Heartbeat(items=1)
    more = msgspec.msgpack.encode(msgspec.msgpack.decode(m.encode(good)) | {"more": 1})
    bad = [
        [token, m.encode(msgspec.structs.replace(good, version=m.PROTOCOL_VERSION - 1))],
        [token, more],
        [token, m.encode(m.Stop())],
        [token, b"noise"],
        [token, m.encode(good)[:-3]],
        [token, b""],
        [token, m.encode(good), b""],
        [m.encode(good)],
        [b"0" * len(token), m.encode(good)],
    ]
    for parts in bad:
        socket.send_multipart([address, *parts])
    process.peer.send(good)
    assert heard(process.channel, 1) == [good]
    assert process.channel.refused == len(bad)
    process.channel.send(m.Stop())
    assert heard(process.peer, 1) == [m.Stop()]


def test_a_message_above_the_cap_is_not_even_received(process, context):
    """ZMQ hangs up on its sender, and on nobody else."""
    with pytest.raises(WorkerError, match="the cap is 65536"):
        process.peer.send(m.Failed(error="x" * m.MAX_MESSAGE_BYTES))
    big = [process.peer._token, bytes(m.MAX_MESSAGE_BYTES + 1)]
    with context.socket(zmq.DEALER) as other:
        other.connect(process.channel.endpoint)
        other.send_multipart(big)
        assert heard(process.peer, 1, 0.1) == [] and process.peer.refused == 0
    process.channel.send(m.Stop())
    assert heard(process.peer, 1) == [m.Stop()]
    process.peer._socket.send_multipart([*process.peer._address, *big])
    process.peer.send(m.Ready(isa=""))
    assert heard(process.channel, 1, 0.1) == [] and process.channel.refused == 0


def test_another_process_of_the_same_user_is_refused(process):
    """Even with the token: the kernel says who it is."""
    for end in (process.peer, process.channel):
        end.peer_pid = os.getppid()
    process.channel.send(m.Stop())
    process.peer.send(m.Ready(isa=""))
    for end in (process.peer, process.channel):
        until(lambda end=end: end.receive(0)[0] == [] and end.refused == 1, "a refusal")


def test_a_process_that_does_not_read_does_not_block(process):
    for _ in range(10_000):
        process.channel.send(m.Stop())


def test_end_of_the_process_is_noticed_at_once(process):
    assert process.wait(0.01) == ([], False)
    os.kill(process.pid, 9)
    assert process.wait(1e6) == ([], True)
    assert process.exit_text() == f"CPU attention process {process.pid} was killed by SIGKILL"
    for _ in range(2):
        process.end()
    assert not psutil.pid_exists(process.pid)


def test_failing_spawn_leaves_nothing(make_arena, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    fd = make_arena().fd
    count = len(os.listdir("/proc/self/fd"))
    with zmq.Context() as context:
        with pytest.raises(WorkerError, match="cannot start the CPU attention process: .*No such"):
            WorkerProcess(context, 1, fd)
    assert len(os.listdir("/proc/self/fd")) == count
