"""Lost servers and failed transfers over real sockets, proxies, and waiting for the other server. On real servers:
test/e2e/test_process_faults.py."""

import socket
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq
from requests.utils import should_bypass_proxies
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.utils import _poll_with_failure_injection

from harness import wait_until
from sglang_scout.plugin import decode, requests
from sglang_scout.plugin.hooks import VERSION
from sglang_scout.plugin.launch import reach_directly
from sglang_scout.plugin.prefill import around_connect_to_decode


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
    return decode.around_connect(CommonKVReceiver._connect.__func__, CommonKVReceiver, endpoint)


@pytest.mark.skipif(VERSION != "0.5.15.post1", reason="SGLang mends it since")
def test_a_message_to_one_that_is_gone_does_not_block(prefill):
    server, endpoint = prefill
    sock, _ = connect(endpoint)
    sock.send(b"a")
    assert server.recv() == b"a"
    assert connect(endpoint)[0] is sock, "of one that lives"
    server.close()
    wait_until("the end is seen", lambda: not sock.poll(0, zmq.POLLOUT), 10)
    other, _ = connect(endpoint)
    sender = threading.Thread(target=other.send, args=(b"b",), daemon=True)
    sender.start()
    sender.join(5)
    assert not sender.is_alive()


def manager_of(*ports):
    """The heartbeat state of SGLang's manager, and the failures that it reports."""
    failed, infos = [], [{"rank_ip": "127.0.0.1", "rank_port": port} for port in ports]
    pool = {f"host:1_0_0_{rank}": [info] for rank, info in enumerate(infos)}
    more = {"_handle_node_failure": failed.append, "failed": failed}
    return SimpleNamespace(connection_lock=threading.Lock(), connection_pool=pool, **more)


def test_a_replaced_one_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as lives, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # without listening
        port, gone = lives.getsockname()[1], dead.getsockname()[1]
        manager = manager_of(port, port)
        decode.after_heartbeat_success(None, manager, "host:1")
        assert manager.failed == []
        manager = manager_of(port, gone)
        decode.after_heartbeat_success(None, manager, "host:2")  # of another prefill server
        assert manager.failed == []
        decode.after_heartbeat_success(None, manager, "host:1")
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
    monkeypatch.setattr(decode.time, "monotonic", lambda: clock[0])
    early = Receiver(status=KVPoll.Failed, init_time=None)
    late = Receiver(status=KVPoll.Success, init_time=1.0)
    polls = lambda: decode.around_poll(_poll_with_failure_injection, [early, late])  # noqa: E731
    assert polls() == [KVPoll.Failed, KVPoll.Success]
    # A health check's, as SGLang's FakeKVReceiver.
    health = SimpleNamespace(poll=lambda: KVPoll.Failed)
    assert decode.around_poll(_poll_with_failure_injection, [health]) == [KVPoll.Failed]
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


@pytest.mark.parametrize("idle", [False, True])
def test_with_the_flag_it_sleeps_while_requests_are_on_their_way(idle):
    sleeper = Mock()
    requests.before_on_idle(SimpleNamespace(idle_sleeper=sleeper, is_fully_idle=lambda: idle))
    assert sleeper.poller.poll.called == (not idle), "without requests SGLang itself sleeps"
    requests.before_on_idle(SimpleNamespace(idle_sleeper=None))


OWN = ("http://127.0.0.1:1/health", "http://localhost:1", "http://[::1]:1", "http://10.1.2.3:1")
OTHERS = ("http://also:1/x", "https://huggingface.co/x", "http://10.9.9.9:8998/route")


def direct(*urls):
    return [should_bypass_proxies(url, no_proxy=None) for url in urls]


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("no_proxy", "also", [True, False, False]),
        ("NO_PROXY", "also", [True, False, False]),
        ("no_proxy", "", [False, False, False]),
        ("no_proxy", "*", [True, True, True]),
    ],
)
def test_proxies_are_for_others_as_before(monkeypatch, name, value, others):
    proxies = dict.fromkeys(("http_proxy", "all_proxy"), "http://127.0.0.1:9")
    for variable, given in (proxies | {"no_proxy": "", "NO_PROXY": "", name: value}).items():
        monkeypatch.setenv(variable, given)
    reach_directly("10.1.2.3")
    assert all(direct(*OWN)) and direct(*OTHERS) == others
    requests.before_kv_manager()  # of a scheduler, which asks the other server of the pair
    assert all(direct(*OWN, *OTHERS))
