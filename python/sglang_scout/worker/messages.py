"""Control messages between the decode server and its worker: small, typed, bounded.

msgspec structs in MessagePack over a socket pair; no pickle, no tensor bytes. Every message carries
the protocol version. The receiver checks the size first and decodes nothing larger than
:data:`MAX_MESSAGE_BYTES`.

Lifecycle of a worker::

    worker -> Hello                       pid and epoch
    client -> Configure                   arena, CPUs, threads
    worker -> Ready | Failed              serving, or why not (then it exits)
    worker -> Heartbeat ...               every heartbeat interval, with statistics
    client -> Stop                        the worker exits with code 0
"""

from __future__ import annotations

from types import UnionType

import msgspec

from sglang_scout.core.errors import WorkerError

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_CHARS = 4000  # of an error text, so that Failed stays far below the cap


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Fields common to all messages: the sender's PROTOCOL_VERSION."""

    version: int = PROTOCOL_VERSION


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own statistics.

    Attributes:
        items: (sequence, part) items computed.
        pending: records published but not finished.
        refused_messages: messages that the worker dropped.
    """

    items: int = 0
    pending: int = 0
    refused_messages: int = 0


class Hello(Message, frozen=True, kw_only=True):
    """First message of a worker."""

    pid: int
    epoch: int


class Configure(Message, frozen=True, kw_only=True):
    """Which arena to serve and with what.

    Attributes:
        epoch: number of this worker process, part of every sequence number.
        arena_bytes: size of the memory file; the worker checks it.
        layout_version: of the ring.
        cpus: one thread is pinned to each.
        cpu_nodes: the arena's node of each, from 0.
        threads_per_group: threads of a node that may share one sequence.
        spin_us: how long an idle thread polls before it sleeps.
        populate: pre-fault the whole arena in the background, see `populate.py`.
        heartbeat_interval_s: time between heartbeats.
    """

    epoch: int
    arena_bytes: int
    layout_version: int
    cpus: list[int]
    cpu_nodes: list[int]
    threads_per_group: int
    spin_us: int
    populate: bool
    heartbeat_interval_s: float


class Ready(Message, frozen=True, kw_only=True):
    """The threads are running. ``isa`` names the attention kernel's instruction set."""

    isa: str
    threads: int


class Failed(Message, frozen=True, kw_only=True):
    """The worker cannot serve and exits. ``error`` is human-readable."""

    error: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every heartbeat interval, numbered from 1."""

    number: int
    stats: Stats


class Stop(Message, frozen=True, kw_only=True):
    """Asks the worker to exit."""


FromWorker = Hello | Ready | Failed | Heartbeat
FromClient = Configure | Stop

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[UnionType, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (FromWorker, FromClient)
}


def encode(message: Message) -> bytes:
    """Encodes a message. Raises WorkerError if it exceeds the cap."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WorkerError(
            f"{type(message).__name__} takes {len(data)} bytes, the cap is {MAX_MESSAGE_BYTES}"
        )
    return data


def decode(data: bytes, kind: UnionType) -> Message:
    """Decodes a message of one direction.

    Args:
        data: as received from the socket.
        kind: ``FromWorker`` or ``FromClient``.

    Raises:
        WorkerError: too large, malformed, unknown or of another version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WorkerError(f"message of {len(data)} bytes, the cap is {MAX_MESSAGE_BYTES}")
    try:
        message = _decoders[kind].decode(data)
    except msgspec.MsgspecError as e:
        raise WorkerError(f"malformed message: {e}") from e
    if message.version != PROTOCOL_VERSION:
        raise WorkerError(
            f"{type(message).__name__} of protocol {message.version}, this is {PROTOCOL_VERSION}"
        )
    return message
