"""The arena's layout in Python: sizes in, offsets out.

The layout is defined once, in sgl-kernel/src/ring.h: structs, order and alignment of all parts, and
the protocol. The native module exports the structs as numpy dtypes and computes the offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_scout import _native
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker.spec import KV_DTYPES, QUERY_DTYPES, ArenaSpec

LAYOUT_VERSION = _native.RING_LAYOUT_VERSION
HEADER_DTYPE = np.dtype(_native.RING_STRUCTS["Header"])
BELL_DTYPE = np.dtype(_native.RING_STRUCTS["Bell"])
EVENT_DTYPE = np.dtype(_native.RING_STRUCTS["Event"])
MOST_THREADS_PER_GROUP = 8  # if their number is not configured

_SIZES = (
    "num_pages",
    "num_layers",
    "page_size",
    "num_kv_heads",
    "num_q_heads",
    "head_dim",
    "max_batch",
    "max_pages",
    "scale",
    "num_nodes",
    "lists",
    "context_pages",
)


class Layout(NamedTuple):
    """Offsets and strides in bytes; ``records``, ``replies`` and ``kv`` start at ``*_offset``."""

    total_bytes: int
    log_entries: int
    control_offset: int
    log_offset: int
    records_offset: int
    record_stride: int
    bell_offset: int
    stats_offset: int
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
    stat_lines: int
    checksums_offset: int


def _header_of(spec: ArenaSpec) -> np.ndarray:
    header = np.zeros(1, HEADER_DTYPE)
    for name in _SIZES:
        header[name] = getattr(spec, name)
    header["dtype"] = KV_DTYPES.index(spec.kv_dtype)
    header["q_dtype"] = QUERY_DTYPES.index(spec.q_dtype)
    header["stripe_pages"] = spec.stripe_pages
    header["checksums_offset"] = spec.checksums  # a flag, replaced by the offset in ring_lay_out
    _native.ring_lay_out(header.ctypes.data)
    return header


def layout_of(spec: ArenaSpec) -> Layout:
    """Offsets of all parts of an arena of these sizes."""
    header = _header_of(spec)[0]
    return Layout(*(int(header[name]) for name in Layout._fields))


def write_header(memory: np.ndarray, spec: ArenaSpec) -> None:
    """Writes the header into ``memory`` uint8 [total_bytes]."""
    memory[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[:] = _header_of(spec)


def read_header(memory: np.ndarray) -> ArenaSpec:
    """The sizes of an arena. Raises ArenaError if the memory is not an arena of this build."""
    if defect := _native.ring_defect(memory.ctypes.data, memory.nbytes):
        raise ArenaError(defect)
    header = memory[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[0]
    sizes = {name: header[name].item() for name in _SIZES}
    dtypes = {"kv_dtype": KV_DTYPES[header["dtype"]], "q_dtype": QUERY_DTYPES[header["q_dtype"]]}
    return ArenaSpec(**sizes, **dtypes, checksums=bool(header["checksums_offset"]))


def node_spans(
    spec: ArenaSpec, layout: Layout, numa_nodes: Sequence[int], align_bytes: int
) -> list[tuple[int, int, int]]:
    """Memory spans by node: (offset, bytes, node), in order, without gaps.

    The ring is on the first node.

    Args:
        numa_nodes: the system's ids of the nodes of the spec, in order.
        align_bytes: size of the system's pages. A system page that contains host pages of two nodes
            is bound to the second.
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


class WorkerMemory(NamedTuple):
    """Host memory that a worker needs in addition to the pages."""

    max_batch: int  # requests that it is sized for
    threads: int  # of a NUMA node that may share a sequence
    ring_bytes: int  # the arena without pages: requests, replies, events
    # Of the worker's own memory, for partial results of threads that share a sequence until they are merged; 0 if none
    # is shared. One for each run of the largest record, for every record that may be in flight; allocated lazily.
    partial_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.ring_bytes + self.partial_bytes

    @property
    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """(what, count, bytes) for a table."""
        ring = ("ring", self.max_batch, self.ring_bytes)
        partial = ("partial results", self.threads, self.partial_bytes)
        return (ring, partial) if self.partial_bytes else (ring,)


def most_threads(threads_per_group: int, node_cpus: int) -> int:
    """Threads of a NUMA node that may share a sequence.

    Args:
        threads_per_group: as in `WorkerConfig`; 0: up to 8, chosen for speed.
        node_cpus: CPUs of the worker on the node that has the fewest.
    """
    return threads_per_group or min(node_cpus, MOST_THREADS_PER_GROUP)


def worker_memory(
    spec: ArenaSpec, threads_per_group: int, node_cpus: Sequence[int]
) -> WorkerMemory:
    """For an arena of these sizes, independent of its number of pages.

    Args:
        threads_per_group: as in `WorkerConfig`.
        node_cpus: CPUs of the worker on each NUMA node.
    """
    nodes, threads = spec.num_nodes, most_threads(threads_per_group, min(node_cpus))
    result_bytes = _native.partial_bytes(spec.num_layers, 1, spec.row_heads, spec.head_dim, 2) // 2
    # In the largest record: one result per sequence, node and run, unless there is only one.
    shared = spec.max_batch * threads if threads > 1 else 0
    if not threads_per_group:
        shared = min(shared, _native.RUNS_PER_THREAD * min(node_cpus))
    results = nodes * max(shared, spec.max_batch if nodes > 1 else 0)
    return WorkerMemory(
        max_batch=spec.max_batch // spec.lists,
        threads=threads,
        ring_bytes=layout_of(spec).kv_offset,
        partial_bytes=results * result_bytes,
    )
