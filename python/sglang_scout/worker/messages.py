"""Control messages between the decode server and its CPU attention process: msgspec structs in MessagePack, of at most
:data:`MAX_MESSAGE_BYTES`, no tensor bytes. How they travel: ``channel.py``.

Lifecycle of a process::

    server  -> Hello                      as soon as the process listens
    process -> Hello
    server  -> Register                   the arena, whose descriptor it inherited
    server  -> Configure                  CPUs, threads
    process -> Ready | Failed             serving, or why not (then it exits)
    process -> Heartbeat ...              every heartbeat interval, with statistics
    server  -> Drain                      finish what is posted
    process -> Drained                    nothing is left
    server  -> Stop                       exit with code 0, at any time
"""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType

import msgspec

from sglang_scout.core.errors import WorkerError

PROTOCOL_VERSION = 8
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_CHARS = 4000  # of an error text


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
    populate: bool = False  # map all of the arena in the background, see PopulateThread


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    version: int = PROTOCOL_VERSION  # the sender's


class Hello(Message, frozen=True, kw_only=True):
    """The first message in each direction."""


class Register(Message, frozen=True, kw_only=True):
    """The arena to map, whose header has the rest."""

    arena_bytes: int  # size of the memory file


class Configure(Message, frozen=True, kw_only=True):
    cpus: list[int]  # one thread is pinned to each
    cpu_nodes: list[int]  # the arena's node of each, from 0
    background_cpus: list[int]  # for mapping pages; empty: any but `cpus`
    most_threads: int  # of a NUMA node that may share a sequence
    config: WorkerConfig


class Ready(Message, frozen=True, kw_only=True):
    """The threads are running."""

    isa: str  # instruction set of the attention kernel


class Failed(Message, frozen=True, kw_only=True):
    """The process cannot serve and exits."""

    error: str  # human-readable


class Heartbeat(Message, frozen=True, kw_only=True):
    items: int = 0  # (sequence, part) items computed by the process
    pending: int = 0  # records published but not finished
    refused_messages: int = 0  # that the process dropped


class Drain(Message, frozen=True, kw_only=True):
    """Asks the process to finish what is posted and to say so."""


class Drained(Message, frozen=True, kw_only=True):
    """Nothing is pending."""


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
    """Decodes a message of ``kind``, ``FromProcess`` or ``FromServer``.

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
