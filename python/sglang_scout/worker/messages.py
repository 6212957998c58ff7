"""Control messages between the decode server and its CPU attention process: small, typed, bounded.

msgspec structs in MessagePack; no pickle, no tensor bytes. Every message carries the protocol version, and takes at
most :data:`MAX_MESSAGE_BYTES`. How they travel: ``channel.py``.

Lifecycle of a process::

    server  -> Hello                      as soon as the process listens
    process -> Hello
    server  -> Register                   the arena, whose descriptor it inherited
    server  -> Configure                  CPUs, threads
    process -> Ready | Failed             serving, or why not (then it exits)
    process -> Heartbeat ...              every heartbeat interval, with statistics
    server  -> Drain                      finish what is posted
    process -> Drained                    nothing is left, final statistics
    server  -> Stop                       exit with code 0, at any time
"""

from __future__ import annotations

from types import UnionType

import msgspec

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker.settings import WorkerConfig

PROTOCOL_VERSION = 6
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_CHARS = 4000  # of an error text, so that Failed stays far below the cap


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Fields common to all messages: the sender's PROTOCOL_VERSION."""

    version: int = PROTOCOL_VERSION


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a process."""

    items: int = 0  # (sequence, part) items computed
    pending: int = 0  # records published but not finished
    refused_messages: int = 0  # that the process dropped


class Hello(Message, frozen=True, kw_only=True):
    """The first message in each direction. Who sent it is the channel's business."""


class Register(Message, frozen=True, kw_only=True):
    """The arena to map. The process checks both."""

    arena_bytes: int  # size of the memory file
    layout_version: int  # of the ring


class Configure(Message, frozen=True, kw_only=True):
    """With what to serve."""

    cpus: list[int]  # one thread is pinned to each
    cpu_nodes: list[int]  # the arena's node of each, from 0
    background_cpus: list[int]  # for mapping pages; empty: any but `cpus`
    config: WorkerConfig  # with the number of `threads_per_group`


class Ready(Message, frozen=True, kw_only=True):
    """The threads are running. ``isa`` names the attention kernel's instruction set."""

    isa: str
    threads: int


class Failed(Message, frozen=True, kw_only=True):
    """The process cannot serve and exits. ``error`` is human-readable."""

    error: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every heartbeat interval."""

    stats: Stats


class Drain(Message, frozen=True, kw_only=True):
    """Asks the process to finish what is posted and to say so."""


class Drained(Message, frozen=True, kw_only=True):
    """Nothing is pending."""

    stats: Stats


class Stop(Message, frozen=True, kw_only=True):
    """Asks the process to exit."""


FromProcess = Hello | Ready | Failed | Heartbeat | Drained
FromServer = Hello | Register | Configure | Drain | Stop

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[UnionType, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (FromProcess, FromServer)
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
        data: as received.
        kind: ``FromProcess`` or ``FromServer``.

    Raises:
        WorkerError: malformed, unknown or of another version.
    """
    try:
        message = _decoders[kind].decode(data)
    except msgspec.MsgspecError as e:
        raise WorkerError(f"malformed message: {e}") from e
    if message.version != PROTOCOL_VERSION:
        raise WorkerError(
            f"{type(message).__name__} of protocol {message.version}, this is {PROTOCOL_VERSION}"
        )
    return message
