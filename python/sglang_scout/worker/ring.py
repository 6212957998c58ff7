"""Sizes of an arena, which the decode server and its worker agree on before anything is mapped, and its layout.

The layout is defined once, in sgl-kernel/src/ring.h: structs, order and alignment of all parts, and the protocol. The
native module exports the structs as numpy dtypes and computes the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from sglang_scout import _native
from sglang_scout.core.errors import ArenaError

HEADER_DTYPE = np.dtype(_native.RING_STRUCTS["Header"])
BELL_DTYPE = np.dtype(_native.RING_STRUCTS["Bell"])
EVENT_DTYPE = np.dtype(_native.RING_STRUCTS["Event"])
# As numbered in sgl-kernel/src/attend.h.
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
QUERY_DTYPES = KV_DTYPES[:2]
MAX_BATCH = 1 << 16
MAX_NODES = _native.RING_MAX_NODES
MAX_THREADS_PER_GROUP = 8  # of a NUMA node that may share a sequence
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_STORAGE = dict(zip(KV_DTYPES, (np.float32, np.uint16, np.uint16, np.uint8, np.uint8), strict=True))
_LIMITS = {
    "num_layers": 1 << 16,
    "num_pages": (1 << 31) - 1,
    "page_size": 2048,
    "num_kv_heads": 1024,
    "num_q_heads": 1 << 14,
    "head_dim": 512,
    "max_batch": MAX_BATCH,
    "max_pages": 1 << 20,
    "num_nodes": MAX_NODES,
    "lists": 1024,
    "context_pages": (1 << 31) - 1,
}


@dataclass(frozen=True)
class ArenaSpec:
    """Sizes of an arena.

    Args:
        num_layers: L.
        num_pages: P, host pages per layer (with SGLang's padding page 0).
        page_size: S, tokens per page.
        num_kv_heads: H.
        num_q_heads: HQ, a multiple of H.
        head_dim: D, a multiple of 16 up to 512.
        kv_dtype: one of ``KV_DTYPES``.
        scale: softmax scale, a factor on q·k.
        max_batch: rows of a record, a multiple of ``lists``.
        max_pages: k, pages per row of a record.
        num_nodes: NUMA nodes that the pages are striped over by index; see ``stripe_pages``.
        lists: page lists (rows of a record) per request: 1, or H, one for each KV head.
        context_pages: C, pages of one KV head in each layer, after the host pages; on the last node.
        q_dtype: of the queries in a record and the output in its reply, one of ``QUERY_DTYPES``: ``"bfloat16"`` for a
            model in bf16. Log-sum-exp is fp32 always.
        checksums: whether there is a checksum for each page and layer, see :class:`PageChecksums`.

    Raises:
        ArenaError: a size is out of range. What does not fit together, such as the numbers of heads, is refused where
            the ring is opened.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    kv_dtype: str
    scale: float
    max_batch: int
    max_pages: int
    num_nodes: int = 1
    lists: int = 1
    context_pages: int = 0
    q_dtype: str = "float32"
    checksums: bool = False

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value, least = getattr(self, name), 0 if name == "context_pages" else 1
            if not least <= value <= limit:
                raise ArenaError(f"{name}={value} is outside {least}..{limit}")
        if self.num_pages + self.context_pages * self.page_size >= 1 << 31:
            raise ArenaError(
                f"context_pages={self.context_pages}: with {self.page_size} tokens each, their token ids exceed 31 bits"
            )

    @property
    def storage_dtype(self) -> np.dtype:
        """Numpy dtype of the pages: float32, or the bits of a narrower type."""
        return np.dtype(_STORAGE[self.kv_dtype])

    @property
    def page_bytes(self) -> int:
        """Bytes of K (or of V) of one page of one layer."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.storage_dtype.itemsize

    @property
    def row_heads(self) -> int:
        """Query heads per row of a record."""
        return self.num_q_heads // self.lists

    @property
    def stripe_pages(self) -> int:
        """Pages per node in every plane: page i is on node ``i // stripe_pages``.

        One contiguous stripe per node keeps the number of mappings far below the limit of a process (65530). Rounded to
        whole huge pages if that costs no node more than an eighth of its share.
        """
        share = -(-self.num_pages // self.num_nodes)
        whole = _HUGE_PAGE_BYTES // math.gcd(self.page_bytes, _HUGE_PAGE_BYTES)
        if self.num_nodes == 1 or 8 * whole * (self.num_nodes - 1) > share:
            return share
        return -(-share // whole) * whole

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all pages of all layers."""
        context_bytes = self.context_pages * (self.page_bytes // self.num_kv_heads)
        return 2 * self.num_layers * (self.num_pages * self.page_bytes + context_bytes)


_SIZES = [x.name for x in fields(ArenaSpec) if x.name not in ("kv_dtype", "q_dtype", "checksums")]


class Layout(SimpleNamespace):
    """The fields of ring.h's Header as numbers: the sizes, and offsets and strides in bytes."""


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
    return Layout(**{name: header[name].item() for name in HEADER_DTYPE.names or ()})


def write_header(memory: np.ndarray, spec: ArenaSpec) -> None:
    memory[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[:] = _header_of(spec)


def read_header(memory: np.ndarray) -> ArenaSpec:
    """The sizes of an arena. Raises ArenaError if the memory is not an arena of this build."""
    if defect := _native.ring_defect(memory.ctypes.data, memory.nbytes):
        raise ArenaError(defect)
    header = memory[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[0]
    return ArenaSpec(
        **{name: header[name].item() for name in _SIZES},
        kv_dtype=KV_DTYPES[header["dtype"]],
        q_dtype=QUERY_DTYPES[header["q_dtype"]],
        checksums=bool(header["checksums_offset"]),
    )


def node_spans(
    spec: ArenaSpec, layout: Layout, numa_nodes: Sequence[int], align_bytes: int
) -> list[tuple[int, int, int]]:
    """Memory spans by node: (offset, bytes, node), in order, without gaps. The ring is on the first node.

    Args:
        numa_nodes: the system's ids of the nodes of the spec, in order.
        align_bytes: size of the system's pages. One that has host pages of two nodes is bound to the second.
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
    """Host memory that a worker needs in addition to the pages: (what, count, bytes)."""

    rows: list[tuple[str, int, int]]

    @property
    def total_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.rows)


class Split(NamedTuple):
    """Parameters of the rule in ``sgl-kernel/src/split.h``, which splits the pages of a batch among threads."""

    threads: int = 1  # that serve the batch; with several NUMA nodes those of one of them
    most: int = 1  # runs of a sequence, each for one thread
    # Of a run of the longest sequence; with several nodes of all runs together.
    min_pages: int = 1


def split_of(spec: ArenaSpec, node_cpus: int) -> Split:
    """The rule for an arena; ``node_cpus``: of the NUMA node that has the fewest."""
    list_bytes = 2 * spec.page_bytes // spec.lists  # of a page
    min_pages = _native.min_run_pages(list_bytes) * spec.num_nodes
    return Split(node_cpus, min(node_cpus, MAX_THREADS_PER_GROUP), min_pages)


def worker_memory(spec: ArenaSpec, node_cpus: Sequence[int]) -> WorkerMemory:
    """For an arena of these sizes, whatever its number of pages; ``node_cpus``: the worker's on each NUMA node."""
    nodes, threads = spec.num_nodes, split_of(spec, min(node_cpus)).most
    # The arena without pages: requests, replies, events.
    rows = [("ring", spec.max_batch // spec.lists, layout_of(spec).kv_offset)]
    # Partial results of threads that share a sequence, allocated lazily: for each record that may be in flight one
    # result per sequence, node and run of the largest record, unless there is only one.
    result_bytes = _native.partial_bytes(spec.num_layers, 1, spec.row_heads, spec.head_dim, 2) // 2
    max_runs = min(spec.max_batch * threads, _native.RUNS_PER_THREAD * min(node_cpus))
    shared = max_runs if threads > 1 else 0
    if results := nodes * max(shared, spec.max_batch if nodes > 1 else 0):
        rows.append(("partial results", threads, results * result_bytes))
    return WorkerMemory(rows)
