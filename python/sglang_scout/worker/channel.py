"""The control channel between the decode server and its CPU attention process, and its messages.

Messages are msgspec structs in MessagePack, without tensor bytes, over ZMQ. Lifecycle of a process::

    server  -> Configure          as soon as the process listens: arena, whose descriptor it inherited, CPUs, threads
    process -> Ready | Failed     serving, or why not (then it exits)
    process -> Heartbeat ...      every heartbeat interval, with statistics
    server  -> Stop               at any time: finish what is posted, then exit with code 0

The endpoint is ``ipc://@sglang-scout-PID-EPOCH-RANDOM``, a name in Linux's abstract namespace: it needs no file, and
ends with its process. Nor has it a mode, so whoever shares the network namespace may connect. What keeps others out:

- libzmq closes connections of all processes but the server before it reads a byte: IPC_FILTER_PID, set before bind.
  IPC_FILTER_UID must not be set beside it: libzmq accepts whom either lets in.
- Each message must come from the one process and user expected at the other end, by the kernel's word (SO_PEERCRED).
- Each carries the boot token of this start, which only the two processes know: none of an earlier life counts.
- The name is not on the command line, which all can read, so nobody can bind it before the process does.

The attention process binds: libzmq aborts a process that has no descriptor left when it accepts a connection, which
must not be the server. ZMQ may lose messages: silence is measured by heartbeats, death is told by a pidfd.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from types import UnionType

import msgspec
import zmq

from sglang_scout.core.errors import WorkerError

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 10
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_CHARS = 4000  # of an error text
_ENDPOINT_ENV, _TOKEN_ENV = "SGLANG_SCOUT_ENDPOINT", "SGLANG_SCOUT_BOOT_TOKEN"
_RECONNECT_MS = 2  # until the process has bound
# Messages: whoever sends without end must not keep the receiver from its other work.
_MAX_AT_ONCE = 64
_LOG_INTERVAL_S = 1.0
_SPARE_DESCRIPTORS, _SPARE_THREADS = 12, 3
ZmqContext = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True)
class WorkerConfig:
    """How the worker is run and supervised; user-settable values were validated with the other keys."""

    ready_timeout_s: float = 30.0  # from process start to its Ready
    heartbeat_interval_s: float = 0.2
    heartbeat_timeout_s: float = 0.8  # silent for so long it is killed and replaced
    # The same for one that has work and makes no progress, and for one that is silent because it is starved of CPU.
    stall_timeout_s: float = 2.0
    wait_timeout_s: float = 10.0  # after this, wait() computes the pages itself
    # Delays before restarts: each is twice the one before. A worker that was ready for the longest resets them.
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    max_start_failures: int = 8  # in a row, before the state is "failed"
    retry_s: float = 30.0  # delay between further starts then
    stop_timeout_s: float = 1.0  # for the worker to exit by itself
    spin_us: int = 50  # how long an idle thread polls before it sleeps
    populate: bool = False  # map all of the arena in the background, see main.map_pages


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    version: int = PROTOCOL_VERSION  # the sender's


class Configure(Message, kw_only=True):
    cpus: list[int]  # one thread is pinned to each
    cpu_nodes: list[int]  # the arena's node of each, from 0
    background_cpus: list[int]  # for mapping pages; empty: any but `cpus`
    max_threads: int  # of a NUMA node that may share a sequence
    config: WorkerConfig


class Ready(Message):
    isa: str  # instruction set of the attention kernel


class Failed(Message):
    error: str  # human-readable


class Heartbeat(Message, kw_only=True):
    items: int = 0  # (sequence, part) items computed by the process
    pending: int = 0  # records published but not finished
    refused_messages: int = 0  # that the process dropped


class Stop(Message): ...


FromProcess = Ready | Failed | Heartbeat
FromServer = Configure | Stop


def encode(message: Message) -> bytes:
    """Raises WorkerError if the message exceeds the cap."""
    data, kind = msgspec.msgpack.encode(message), type(message).__name__
    if len(data) > MAX_MESSAGE_BYTES:
        raise WorkerError(f"{kind} takes {len(data)} bytes, the cap is {MAX_MESSAGE_BYTES}")
    return data


def open_context() -> ZmqContext:
    """A context whose threads run. libzmq aborts the process where a context cannot start them, so what it takes is
    tried first. Raises WorkerError where too few descriptors or threads are left."""
    done = threading.Event()
    try:
        with contextlib.ExitStack() as tried:
            for _ in range(_SPARE_DESCRIPTORS):
                tried.callback(os.close, os.eventfd(0))
            for _ in range(_SPARE_THREADS):
                thread = threading.Thread(target=done.wait, daemon=True)
                thread.start()
                tried.callback(thread.join)
                tried.callback(done.set)  # called before it
    except (OSError, RuntimeError) as e:
        fix = "raise ulimit -n, or the limit of processes (ulimit -u, pids.max)"
        raise WorkerError(f"cannot start the CPU attention process: {e}; {fix}") from e
    context: ZmqContext = zmq.Context()
    context.socket(zmq.PAIR).close(0)  # starts them
    return context


class Channel:
    """One end of the channel. Owned by one thread.

    A message is two frames, token and struct. Before them the process's end has the address of the sender; it replies
    to the one whose message it accepted last.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, token: str, kind: UnionType, peer_pid: int
    ) -> None:
        self.endpoint, self.peer_pid = endpoint, peer_pid  # whose messages are accepted
        self.refused = 0  # messages that were dropped
        self._socket, self._token = socket, token.encode()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._address: list[bytes] = []
        self._log_s = 0.0  # not before
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # ZMQ hangs up on whoever sends more

    @classmethod
    def connect(cls, context: ZmqContext, epoch: int) -> Channel:
        """The server's end; set ``peer_pid`` when the process has been started. Raises zmq.ZMQError."""
        endpoint = f"ipc://@sglang-scout-{os.getpid()}-{epoch}-{secrets.token_hex(8)}"
        socket = context.socket(zmq.DEALER)
        channel = cls(socket, endpoint, secrets.token_hex(16), FromProcess, -1)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(endpoint)
        return channel

    def environment(self) -> dict[str, str]:
        """What :meth:`bind` needs. Other users can read a process's command line, but not its environment."""
        return {_ENDPOINT_ENV: self.endpoint, _TOKEN_ENV: self._token.decode()}

    @classmethod
    def bind(cls, context: ZmqContext, server_pid: int) -> Channel:
        endpoint, token = os.environ.pop(_ENDPOINT_ENV), os.environ.pop(_TOKEN_ENV)
        socket = context.socket(zmq.ROUTER)
        channel = cls(socket, endpoint, token, FromServer, server_pid)
        # libzmq looks up the names of users that it refuses, in its only thread; a name service may be slow. In a class
        # Python would mangle the function's name.
        getattr(ctypes.CDLL(None), "__nss_configure_lookup")(b"passwd", b"files")
        socket.setsockopt(zmq.IPC_FILTER_PID, server_pid)
        socket.bind(endpoint)
        return channel

    def receive(self, timeout_s: float, fd: int | None = None) -> tuple[list[Message], bool]:
        """Blocks until a message comes, ``fd`` is readable, or on timeout. Returns the valid messages that have come,
        and whether ``fd`` is readable. Other messages are counted, and logged once a second."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if fd is not None:
            poller.register(fd, zmq.POLLIN)
        # One more millisecond: ZMQ rounds down, and a poll of 0 ms would spin.
        ready = poller.poll(int(max(timeout_s, 0.0) * 1e3) + 1)
        received: list[Message] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_AT_ONCE):
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                try:
                    received.append(self._accept(frames))
                except WorkerError as e:
                    self.refused += 1
                    if (now_s := time.monotonic()) >= self._log_s:
                        self._log_s = now_s + _LOG_INTERVAL_S
                        what = "control channel of CPU attention: dropped a message (%d so far): %s"
                        logger.warning(what, self.refused, e)
        return received, any(one == fd for one, _ in ready)

    def send(self, message: Message) -> None:
        """Sends; lost if nobody reads."""
        frames = [*self._address, self._token, encode(message)]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)

    def _accept(self, frames: list[zmq.Frame]) -> Message:
        sender = -1, -1  # if the kernel does not tell
        with contextlib.suppress(zmq.ZMQError, ValueError):
            _, uid, _, pid = str(frames[-1].get("Peer-Address")).rsplit(":", 3)  # host:uid:gid:pid
            sender = int(uid), int(pid)
        if sender != (os.geteuid(), self.peer_pid):
            raise WorkerError(f"it is from user and process {sender}, not from {self.peer_pid}")
        *address, token, data = (b"", *(frame.bytes for frame in frames))
        if token != self._token:
            raise WorkerError("it lacks the token of this start")
        try:
            message = self._decoder.decode(data)
        except msgspec.MsgspecError as e:
            raise WorkerError(f"malformed message: {e}") from e
        if message.version != PROTOCOL_VERSION:
            raise WorkerError(f"of protocol {message.version}, this is {PROTOCOL_VERSION}")
        self._address = address[1:]
        return message
