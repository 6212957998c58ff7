"""Lost servers of a pair and messages between them, over real sockets; the pages of failed transfers. On real servers:
test/e2e/test_process_faults.py."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import socket
import threading
from types import SimpleNamespace

import pytest
import zmq

pytest.importorskip("sglang.srt.plugins", reason="needs SGLang")
from sglang.srt.disaggregation.base import KVPoll  # noqa: E402
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver  # noqa: E402
from sglang.srt.disaggregation.utils import _poll_with_failure_injection  # noqa: E402

from harness import wait_until  # noqa: E402
from sglang_scout.plugin import fixes as transfer_faults  # noqa: E402
from sglang_scout.plugin.fixes import (  # noqa: E402
    after_heartbeat_success,
    around_connect,
    around_connect_to_decode,
    around_poll,
)
from sglang_scout.plugin.release import VERSION  # noqa: E402


@pytest.fixture
def prefill():
    """A prefill server's socket, and its endpoint."""
    server = zmq.Context.instance().socket(zmq.PULL)
    server.linger = 0
    port = server.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    yield server, endpoint
    server.close()
    CommonKVReceiver.disconnect_endpoint(endpoint)


def connect(endpoint):
    return around_connect(CommonKVReceiver._connect.__func__, CommonKVReceiver, endpoint)


def test_a_living_one_keeps_its_socket(prefill):
    server, endpoint = prefill
    sock, _ = connect(endpoint)
    sock.send(b"a")
    assert server.recv() == b"a"
    assert connect(endpoint)[0] is sock


def test_a_message_to_one_that_is_gone_does_not_block(prefill):
    server, endpoint = prefill
    sock, _ = connect(endpoint)
    sock.send(b"a")
    assert server.recv() == b"a"
    server.close()
    if (
        VERSION == "0.5.15.post1"
    ):  # sockets of later releases accept messages and reconnect by themselves
        wait_until("the end is seen", lambda: not sock.poll(0, zmq.POLLOUT), 10)
    other, _ = connect(endpoint)
    sender = threading.Thread(target=other.send, args=(b"b",), daemon=True)
    sender.start()
    sender.join(5)
    assert not sender.is_alive()


def manager_of(*ports):
    """The heartbeat state of SGLang's manager, and the failures that it reports."""
    failed = []
    return SimpleNamespace(
        connection_lock=threading.Lock(),
        connection_pool={
            f"host:1_0_0_{rank}": [{"rank_ip": "127.0.0.1", "rank_port": port}]
            for rank, port in enumerate(ports)
        },
        _handle_node_failure=failed.append,
        failed=failed,
    )


def test_a_replaced_one_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as lives, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # without listening
        port, gone = lives.getsockname()[1], dead.getsockname()[1]
        manager = manager_of(port, port)
        after_heartbeat_success(None, manager, "host:1")
        assert manager.failed == []
        manager = manager_of(port, gone)
        after_heartbeat_success(None, manager, "host:2")  # another prefill server's heartbeat
        assert manager.failed == []
        after_heartbeat_success(None, manager, "host:1")
        assert manager.failed == ["host:1"]


class Receiver(SimpleNamespace):
    """SGLang's, on its own side of the network."""

    conclude_state, abort_notified, told = None, False, 0

    def poll(self):
        return self.status if self.conclude_state is None else self.conclude_state

    def _send_abort_notification(self):
        self.told += 1


def test_the_pages_of_a_transfer_that_failed_are_kept_for_a_while(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(transfer_faults.time, "monotonic", lambda: clock[0])
    early = Receiver(status=KVPoll.Failed, init_time=None)
    late = Receiver(status=KVPoll.Success, init_time=1.0)
    polls = lambda: around_poll(_poll_with_failure_injection, [early, late])  # noqa: E731
    assert polls() == [KVPoll.Failed, KVPoll.Success]
    # A health check's, as SGLang's FakeKVReceiver.
    health = SimpleNamespace(poll=lambda: KVPoll.Failed)
    assert around_poll(_poll_with_failure_injection, [health]) == [KVPoll.Failed]
    with monkeypatch.context() as failing:
        failing.setenv("SGLANG_TEST_DISAGG_FAILURE_PROB", "1.0")
        assert polls() == [KVPoll.Failed, KVPoll.Transferring]
    for now_s, seen in ((101.9, KVPoll.Transferring), (102.0, KVPoll.Failed)):
        clock[0] = now_s
        assert polls() == [KVPoll.Failed, seen]
    assert (early.told, late.told) == (0, 1), "the prefill server may still write"


@pytest.fixture
def prefill_manager():
    """SGLang's, with only its sockets."""
    manager = object.__new__(CommonKVManager)
    manager._zmq_ctx = zmq.Context()
    manager._socket_cache, manager._monitor_cache, manager._socket_send_locks = {}, {}, {}
    manager._socket_lock = threading.Lock()
    yield manager
    manager._zmq_ctx.destroy(linger=0)


def test_messages_of_two_threads_do_not_mix(prefill, prefill_manager):
    server, endpoint = prefill
    count = 5000
    messages = ([b"room", b"status", b"rank"], [b"ABORT_ACK", b"room"])

    def send(message):
        for _ in range(count):
            around_connect_to_decode(
                CommonKVManager._connect, prefill_manager, endpoint
            ).send_multipart(message)

    threads = [threading.Thread(target=send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    received = [server.recv_multipart() for _ in range(2 * count) if server.poll(10_000)]
    for thread in threads:
        thread.join()
    assert [received.count(message) for message in messages] == [count, count]


def test_a_message_to_a_closed_socket_is_lost_and_no_more(prefill, prefill_manager):
    _, endpoint = prefill
    sender = around_connect_to_decode(CommonKVManager._connect, prefill_manager, endpoint)
    prefill_manager._socket_cache[endpoint].close()  # as by another thread that detected it
    sender.send_multipart([b"a"])
