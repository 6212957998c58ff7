"""Byte layout of the arena: header, doorbell, statistics, request ring, replies, KV pages.

One memory file, mapped by the decode server and by its worker; all values little-endian::

    0                Header     4096 bytes, written once by Arena.create
    control_offset   Control    head u64 @0, bell u32 @128, sleepers u32 @256, epoch u32 @384,
                                trace u32 @512
    stats_offset     StatLine   [stat_lines] of 128 bytes, each written by one worker thread
    log_offset       u64        [log_entries]: post n at n % log_entries = n << 24 | slot
    records_offset   2*L slots  RecordHeader (seq u64 @0, layer u32 @8, rows u32 @12, parts u32 @16,
                                step u64 @24, claim u64 [16] @128, of which the first num_nodes
                                count), then q, pages, n_pages
    replies_offset   2*L slots  ReplyHeader (done u64 @0, status u32 @8, waiters u32 @128), out, lse
    events_offset    stat_lines rings of event_entries Events of 64 bytes, written while trace is set
    kv_offset        L layers   K [P,S,H,D], then V [P,S,H,D]; kv_offset is a multiple of 2 MiB, with
                                several nodes every plane begins at one

``slot(layer, step) = (step & 1) * L + layer``, ``seq = epoch << 40 | post``. Who writes what, in
which order and in which state of a slot is said in sgl-kernel/src/ring.h, which mirrors this file
and refuses a header that it cannot follow. The hot path is C++; here are the sizes, and numpy views
of the shared words for tests and diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from sglang_scout.core.errors import ArenaError
from sglang_scout.worker.spec import KV_DTYPES, MAX_NODES, ArenaSpec

MAGIC = 0x31474E5254554353
LAYOUT_VERSION = 6
HEADER_BYTES = 4096
CONTROL_BYTES = 640
STAT_LINE_BYTES = 128
STAT_LINES = 1024  # most threads of a worker
SLOT_HEADER_BYTES = 256
EVENT_ENTRIES = 256  # of one thread: four steps of a model of 64 layers, read at every step
KV_ALIGN_BYTES = 2 * 1024 * 1024
PLANE_ALIGN_BYTES = 4096
CLOSED_ITEM = (1 << 24) - 1

_HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u8"), ("layout_version", "<u4"), ("header_bytes", "<u4"),
        ("total_bytes", "<u8"), ("num_pages", "<i8"), ("num_layers", "<u4"),
        ("page_size", "<u4"), ("num_kv_heads", "<u4"), ("num_q_heads", "<u4"),
        ("head_dim", "<u4"), ("dtype", "<u4"), ("max_batch", "<u4"), ("max_pages", "<u4"),
        ("scale", "<f4"), ("logit_cap", "<f4"), ("log_entries", "<u4"), ("stat_lines", "<u4"),
        ("control_offset", "<u8"), ("stats_offset", "<u8"), ("log_offset", "<u8"),
        ("records_offset", "<u8"), ("record_stride", "<u8"), ("replies_offset", "<u8"),
        ("reply_stride", "<u8"), ("kv_offset", "<u8"), ("layer_stride", "<u8"),
        ("v_offset", "<u8"), ("q_offset", "<u8"), ("pages_offset", "<u8"),
        ("n_pages_offset", "<u8"), ("out_offset", "<u8"), ("lse_offset", "<u8"),
        ("events_offset", "<u8"), ("event_entries", "<u8"),
        ("num_nodes", "<u4"), ("stripe_pages", "<u4"),
    ]
)  # fmt: skip
assert _HEADER_DTYPE.itemsize == 224


def _at(offsets: dict[str, tuple[str, int]], size: int) -> np.dtype:
    return np.dtype(
        {
            "names": list(offsets),
            "formats": [f for f, _ in offsets.values()],
            "offsets": [o for _, o in offsets.values()],
            "itemsize": size,
        }
    )


CONTROL_DTYPE = _at(
    {"head": ("<u8", 0), "bell": ("<u4", 128), "sleepers": ("<u4", 256), "epoch": ("<u4", 384),
     "trace": ("<u4", 512)},
    CONTROL_BYTES,
)  # fmt: skip
STAT_DTYPE = _at(
    {n: ("<u8", 8 * i) for i, n in enumerate(
        ("items", "pages", "busy_ns", "refused", "stale", "records", "events", "remote_pages"))},
    STAT_LINE_BYTES,
)  # fmt: skip
RECORD_DTYPE = _at(
    {"seq": ("<u8", 0), "layer": ("<u4", 8), "rows": ("<u4", 12), "parts": ("<u4", 16),
     "step": ("<u8", 24), "claim": (f"({MAX_NODES},)<u8", 128)},
    SLOT_HEADER_BYTES,
)  # fmt: skip
REPLY_DTYPE = _at(
    {"done": ("<u8", 0), "status": ("<u4", 8), "waiters": ("<u4", 128)}, SLOT_HEADER_BYTES
)
EVENT_DTYPE = np.dtype(
    [
        ("stamp", "<u8"), ("seq", "<u8"), ("step", "<u8"), ("begin_ns", "<i8"),
        ("end_ns", "<i8"), ("layer", "<u4"), ("first_item", "<u4"), ("items", "<u4"),
        ("parts", "<u4"), ("pages", "<u4"), ("unused", "<u4"),
    ]
)  # fmt: skip
assert EVENT_DTYPE.itemsize == 64


class Layout(NamedTuple):
    """Offsets and strides in bytes; ``records``, ``replies`` and ``kv`` start at ``*_offset``."""

    total_bytes: int
    log_entries: int
    control_offset: int
    stats_offset: int
    log_offset: int
    records_offset: int
    record_stride: int
    replies_offset: int
    reply_stride: int
    kv_offset: int
    layer_stride: int
    v_offset: int
    q_offset: int
    pages_offset: int
    n_pages_offset: int
    out_offset: int
    lse_offset: int
    events_offset: int
    event_entries: int


def _up(value: int, align: int) -> int:
    return (value + align - 1) // align * align


def plane_align_bytes(spec: ArenaSpec) -> int:
    """With several nodes no huge page may hold the end of one node's pages and the start of another's."""
    return KV_ALIGN_BYTES if spec.num_nodes > 1 else PLANE_ALIGN_BYTES


def layout_of(spec: ArenaSpec) -> Layout:
    """Where everything of an arena of these sizes lies."""
    slots = 2 * spec.num_layers
    q_bytes = spec.max_batch * spec.num_q_heads * spec.head_dim * 4
    pages_offset = SLOT_HEADER_BYTES + _up(q_bytes, 128)
    n_pages_offset = pages_offset + _up(spec.max_batch * spec.max_pages * 4, 128)
    record_stride = n_pages_offset + _up(spec.max_batch * 4, 128)
    lse_offset = SLOT_HEADER_BYTES + _up(q_bytes, 128)
    reply_stride = lse_offset + _up(spec.max_batch * spec.num_q_heads * 4, 128)
    log_entries = 1 << (2 * slots).bit_length()  # more than twice the records that can be open
    stats_offset = HEADER_BYTES + CONTROL_BYTES
    log_offset = stats_offset + STAT_LINES * STAT_LINE_BYTES
    records_offset = _up(log_offset + 8 * log_entries, 4096)
    replies_offset = _up(records_offset + slots * record_stride, 4096)
    events_offset = _up(replies_offset + slots * reply_stride, 4096)
    events_bytes = STAT_LINES * EVENT_ENTRIES * EVENT_DTYPE.itemsize
    kv_offset = _up(events_offset + events_bytes, KV_ALIGN_BYTES)
    plane = _up(spec.num_pages * spec.page_bytes, plane_align_bytes(spec))
    return Layout(
        total_bytes=_up(kv_offset + 2 * spec.num_layers * plane, KV_ALIGN_BYTES),
        log_entries=log_entries,
        control_offset=HEADER_BYTES,
        stats_offset=stats_offset,
        log_offset=log_offset,
        records_offset=records_offset,
        record_stride=record_stride,
        replies_offset=replies_offset,
        reply_stride=reply_stride,
        kv_offset=kv_offset,
        layer_stride=2 * plane,
        v_offset=plane,
        q_offset=SLOT_HEADER_BYTES,
        pages_offset=pages_offset,
        n_pages_offset=n_pages_offset,
        out_offset=SLOT_HEADER_BYTES,
        lse_offset=lse_offset,
        events_offset=events_offset,
        event_entries=EVENT_ENTRIES,
    )


def node_spans(
    spec: ArenaSpec, layout: Layout, numa_nodes: Sequence[int], align_bytes: int
) -> list[tuple[int, int, int]]:
    """What lies on which node: (offset, bytes, node), in order, without gaps.

    The ring lies on the first node.

    Args:
        numa_nodes: what the system calls the nodes of the spec, in order.
        align_bytes: size of the system's pages. Where the pages of two nodes meet within one of them,
            the first node's K or V there is the second's to read.
    """
    if spec.num_nodes == 1:
        return [(0, layout.total_bytes, numa_nodes[0])]
    starts = [(0, numa_nodes[0])]
    for plane in range(2 * spec.num_layers):
        for i, node in enumerate(numa_nodes):
            first = min(i * spec.stripe_pages, spec.num_pages) * spec.page_bytes
            offset = layout.kv_offset + plane * layout.v_offset + first
            starts.append((offset // align_bytes * align_bytes, node))
    ends = [start for start, _ in starts[1:]] + [layout.total_bytes]
    spans = zip(starts, ends, strict=True)
    return [(start, end - start, node) for (start, node), end in spans if end > start]


def write_header(memory: np.ndarray, spec: ArenaSpec, layout: Layout) -> None:
    """Writes the header into ``memory`` uint8 [total_bytes]; the magic number last."""
    header = memory[: _HEADER_DTYPE.itemsize].view(_HEADER_DTYPE)[0]
    values = asdict(spec) | layout._asdict()
    values["dtype"] = KV_DTYPES[values.pop("kv_dtype")]
    values |= {
        "layout_version": LAYOUT_VERSION,
        "header_bytes": HEADER_BYTES,
        "stat_lines": STAT_LINES,
        "stripe_pages": spec.stripe_pages,
    }
    for name, value in values.items():
        header[name] = value
    header["magic"] = MAGIC


def read_header(memory: np.ndarray) -> tuple[ArenaSpec, Layout]:
    """Reads a header back. Raises ArenaError if the memory is no arena of this version."""
    if memory.nbytes < HEADER_BYTES:
        raise ArenaError(f"{memory.nbytes} bytes are too few for an arena")
    header = memory[: _HEADER_DTYPE.itemsize].view(_HEADER_DTYPE)[0]
    if int(header["magic"]) != MAGIC:
        raise ArenaError("the memory file is no sglang-scout arena (magic number differs)")
    if int(header["layout_version"]) != LAYOUT_VERSION:
        raise ArenaError(
            f"arena layout version {header['layout_version']}, this build has {LAYOUT_VERSION}"
        )
    names = {v: k for k, v in KV_DTYPES.items()}
    if int(header["dtype"]) not in names:
        raise ArenaError(f"arena header has dtype {header['dtype']}, known are {names}")
    fields = [f for f in ArenaSpec.__dataclass_fields__ if f != "kv_dtype"]
    spec = ArenaSpec(**{f: header[f].item() for f in fields}, kv_dtype=names[int(header["dtype"])])
    layout = layout_of(spec)
    if layout.total_bytes != int(header["total_bytes"]) or layout.total_bytes > memory.nbytes:
        raise ArenaError(
            f"arena header says {header['total_bytes']} bytes, its sizes need "
            f"{layout.total_bytes}, mapped are {memory.nbytes}"
        )
    return spec, layout


class RingView:
    """Numpy views of the shared words and buffers, for tests and diagnosis; copies nothing."""

    def __init__(self, memory: np.ndarray, spec: ArenaSpec, layout: Layout) -> None:
        self._memory, self._spec, self._layout = memory, spec, layout
        self.control = self._view(layout.control_offset, (1,), CONTROL_DTYPE)[0]
        self.stats = self._view(layout.stats_offset, (STAT_LINES,), STAT_DTYPE)
        self.log = self._view(layout.log_offset, (layout.log_entries,), np.dtype("<u8"))
        events = (STAT_LINES, layout.event_entries)
        self.events = self._view(layout.events_offset, events, EVENT_DTYPE)

    def _view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).reshape(shape)

    def slot(self, layer: int, step: int) -> int:
        return (step & 1) * self._spec.num_layers + layer

    def record(self, slot: int) -> np.void:
        """The record's header; fields seq, layer, rows, parts, claim."""
        base = self._layout.records_offset + slot * self._layout.record_stride
        return self._view(base, (1,), RECORD_DTYPE)[0]

    def reply(self, slot: int) -> np.void:
        """The reply's header; fields done, status, waiters."""
        base = self._layout.replies_offset + slot * self._layout.reply_stride
        return self._view(base, (1,), REPLY_DTYPE)[0]
