"""The hook functions for failed transfers and lost servers of a pair; see ``hooks.py`` for targets.

On the decode server SGLang's PUSH sockets to a prefill server do not reconnect, and one that has lost its peer blocks
in ``send`` forever. The scheduler's thread sends, holding the socket's lock, which the heartbeat thread that would
detect the loss waits for.

On the prefill server several threads send through one socket. Parts of two messages then merge into one: an answer to
an abort swallows the end-of-transfer message, and the other request waits forever, or the thread of the decode server
that reads them ends.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll

logger = logging.getLogger(__name__)

_ANSWER_S = 0.05  # a step's time; a server that is well answers sooner
_PROBE_S = 2.0
HOLD_S = 2.0
"""Longer than the prefill server may still write to the pages of an ended request: one chunk of a prompt."""


def around_connect(
    original: Callable[..., Any], receiver: Any, endpoint: str, is_ipv6: bool = False
) -> Any:
    """A usable socket: a new one if the peer of the last is gone.

    A new one queues messages before it is connected. Without a peer they are lost; heartbeats fail the requests.
    """
    connected = original(receiver, endpoint, is_ipv6)
    sock, lock = connected
    with lock:
        if sock.poll(0, zmq.POLLOUT):
            return connected
    receiver.disconnect_endpoint(endpoint)
    return original(receiver, endpoint, is_ipv6)


def around_ensure_parallel_info(
    original: Callable[[Any, str], bool], manager: Any, address: str
) -> bool:
    """SGLang asks in the scheduler's thread, for 5 s if there is no answer, and asks again each second.

    What differs between the servers, such as the page size, it raises: then the requests of this address fail.
    """
    if address in manager.prefill_info_table:
        return True
    questions: dict[str, Future[bool]] = vars(manager).setdefault("kv_offload_questions", {})
    is_new = address not in questions
    if is_new:
        questions[address] = Future()
        thread = Thread(
            target=_ask, args=(original, manager, address, questions[address]), daemon=True
        )
        thread.start()
    try:
        answer = questions[address].result(_ANSWER_S if is_new else 0)
    except TimeoutError:
        return False
    except Exception as error:
        answer = False
        logger.error("--kv-offload: %s", error)
        for room in list(manager.addr_to_rooms_tracker[address]):
            manager.record_failure(room, str(error))
            manager.update_status(room, KVPoll.Failed)
    del questions[address]
    return answer


def _ask(
    original: Callable[[Any, str], bool], manager: Any, address: str, answer: Future[bool]
) -> None:
    try:
        answer.set_result(original(manager, address))
    except Exception as error:
        answer.set_exception(error)


def after_heartbeat_success(_: None, manager: Any, address: str) -> None:
    """The bootstrap server at ``address`` answers. If nothing listens at its scheduler's old address, it was replaced
    since the last heartbeat, or will be: drop the old one, and fail the requests that wait for it."""
    with manager.connection_lock:
        known = [
            (info["rank_ip"], info["rank_port"])
            for key, infos in manager.connection_pool.items()
            if key.startswith(f"{address}_")
            for info in infos
        ]
    for place in known:
        try:
            socket.create_connection(place, _PROBE_S).close()
        except ConnectionRefusedError:
            manager._handle_node_failure(address)
            return
        except OSError:  # slow, or no descriptor left: not proof that it is gone
            pass


def around_poll(
    original: Callable[[Sequence[Any]], list[int]], receivers: Sequence[Any]
) -> list[int]:
    """Keep the pages of a transfer that failed, or whose client has disconnected, for ``HOLD_S``.

    SGLang frees them at once, and another request may get them while the prefill server still writes.
    """
    return [_kept(*polled) for polled in zip(receivers, original(receivers), strict=True)]


def _kept(receiver: Any, status: int) -> int:
    if status != KVPoll.Failed or getattr(receiver, "init_time", None) is None:  # no page was named
        return status
    if "kv_offload_failed_s" not in vars(receiver):
        receiver.kv_offload_failed_s = time.monotonic()
        receiver.conclude_state = KVPoll.Failed
        # SGLang does not notify the prefill server if this side gave up: it would write much later.
        if not receiver.abort_notified:
            receiver._send_abort_notification()
            receiver.abort_notified = True
    held = time.monotonic() - receiver.kv_offload_failed_s < HOLD_S
    return int(KVPoll.Transferring if held else KVPoll.Failed)


class Sender:
    """A thread-safe socket to a decode server. Send failures mean that it is gone and are dropped: an exception would
    end the thread, and with it the transfers to all others."""

    def __init__(self, sock: zmq.Socket[bytes], lock: Any) -> None:
        self._sock, self._lock = sock, lock

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        try:
            with self._lock:
                self._sock.send_multipart(parts)
        except zmq.ZMQError as error:
            logger.error(
                "--kv-offload: a message to a decode server that is gone was lost: %s", error
            )


def around_connect_to_decode(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Sender:
    return Sender(original(manager, *args, **kwargs), manager._socket_lock)
