"""The control channel between the decode server and its CPU attention process: ZMQ over a local socket.

The endpoint is ``ipc://@sglang-scout-PID-EPOCH-RANDOM``, a name in Linux's abstract namespace: no file, so it needs no
room and no short path in TMPDIR, and it ends with its process. Nor has it a mode, so whoever shares the network
namespace may connect. What keeps others out:

- libzmq closes connections of other users before it reads a byte (IPC_FILTER_UID, set before bind).
- Each message must come from the one process expected at the other end, by the kernel's word (SO_PEERCRED).
- Each carries the boot token of this start, which only the two processes know: none of an earlier life counts.
- The name is not on the command line, which all can read, so nobody can bind it before the process does.

The attention process binds, the server connects: libzmq aborts a process that has no descriptor left when it accepts
a local connection, which must not be the server. ZMQ may lose messages, reconnect and queue as it likes: silence is
measured by heartbeats, death is told by a pidfd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable
from types import UnionType

import zmq

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m

_ENDPOINT_ENV, _TOKEN_ENV = "SGLANG_SCOUT_ENDPOINT", "SGLANG_SCOUT_BOOT_TOKEN"
_RECONNECT_MS = 2  # until the process has bound

ZmqContext = zmq.Context[zmq.Socket[bytes]]


class Channel:
    """One end of the channel. Owned by one thread.

    A message is two frames, token and struct. The process's end prefixes the address of the sender, and replies to
    the one whose message it accepted last.

    Attributes:
        endpoint: as above.
        peer_pid: process whose messages are accepted.
        refused: messages that were dropped.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, token: str, receives: UnionType, peer_pid: int,
        log: logging.Logger,
    ) -> None:  # fmt: skip
        self.endpoint, self.peer_pid, self.refused = endpoint, peer_pid, 0
        self._socket, self._token, self._receives, self._log = socket, token.encode(), receives, log
        self._is_router = socket.type == zmq.ROUTER
        self._address: list[bytes] = []
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES)  # ZMQ hangs up on whoever sends more

    @classmethod
    def connect(cls, context: ZmqContext, epoch: int, log: logging.Logger) -> Channel:
        """The server's end; set ``peer_pid`` when the process has been started. Raises zmq.ZMQError."""
        endpoint = f"ipc://@sglang-scout-{os.getpid()}-{epoch}-{secrets.token_hex(8)}"
        socket = context.socket(zmq.DEALER)
        channel = cls(socket, endpoint, secrets.token_hex(16), m.FromWorker, -1, log)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(endpoint)
        return channel

    def environment(self) -> dict[str, str]:
        """What :meth:`bind` needs. Other users can read a process's command line, but not its environment."""
        return {_ENDPOINT_ENV: self.endpoint, _TOKEN_ENV: self._token.decode()}

    @classmethod
    def bind(cls, context: ZmqContext, server_pid: int, log: logging.Logger) -> Channel:
        """The attention process's end."""
        endpoint, token = os.environ.pop(_ENDPOINT_ENV), os.environ.pop(_TOKEN_ENV)
        socket = context.socket(zmq.ROUTER)
        channel = cls(socket, endpoint, token, m.FromClient, server_pid, log)
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        socket.bind(endpoint)
        return channel

    def wait(self, timeout_s: float, fds: Iterable[int] = ()) -> list[int]:
        """Blocks until a message has come, one of ``fds`` is readable, or on timeout. Returns those readable."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        # One more millisecond: ZMQ rounds down, and a poll of 0 ms would spin.
        ready = poller.poll(int(max(timeout_s, 0.0) * 1e3) + 1)
        return [one for one, _ in ready if isinstance(one, int)]

    def receive(self) -> list[m.Message]:
        """The valid messages that have come. Others are logged and counted."""
        received: list[m.Message] = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                try:
                    received.append(self._accept(frames))
                except WorkerError as e:
                    self.refused += 1
                    self._log.warning("control of CPU attention: dropped a message: %s", e)
        return received

    def send(self, message: m.Message) -> None:
        """Sends; lost if nobody reads."""
        frames = [*self._address, self._token, m.encode(message)]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Releases the socket and its name; idempotent."""
        self._socket.close(0)

    def _accept(self, frames: list[zmq.Frame]) -> m.Message:
        if (sender := _credentials(frames[-1])) != (os.geteuid(), self.peer_pid):
            raise WorkerError(f"from user and process {sender}, not {self.peer_pid}")
        parts = [frame.bytes for frame in frames]
        address, rest = parts[: self._is_router], parts[self._is_router :]
        if len(rest) != 2 or rest[0] != self._token:
            raise WorkerError("without the token of this start")
        message = m.decode(rest[1], self._receives)
        self._address = address
        return message


def _credentials(frame: zmq.Frame) -> tuple[int, int]:
    """User and process at the other end of the connection, from the kernel; (-1, -1) if it does not tell."""
    with contextlib.suppress(zmq.ZMQError, ValueError):
        _, uid, _, pid = str(frame.get("Peer-Address")).rsplit(":", 3)  # host:uid:gid:pid
        return int(uid), int(pid)
    return -1, -1
