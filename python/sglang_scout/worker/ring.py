"""Sizes of an arena, which the decode server and its worker agree on before anything is mapped, and its layout.

The layout is defined once, in sgl-kernel/src/ring.h: structs, order and alignment of all parts, and the protocol. The
native module exports the structs as numpy dtypes and computes the offsets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from sglang_scout import _native
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, flag_gib, gib

HEADER_DTYPE = np.dtype(_native.RING_STRUCTS["Header"])
BELL_DTYPE = np.dtype(_native.RING_STRUCTS["Bell"])
EVENT_DTYPE = np.dtype(_native.RING_STRUCTS["Event"])
# As numbered in sgl-kernel/src/attend.h.
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
QUERY_DTYPES = KV_DTYPES[:2]
MAX_BATCH = 1 << 16
MAX_NODES = _native.RING_MAX_NODES
MAX_THREADS_PER_GROUP = 8  # of a NUMA node that may share a sequence
_STORAGE = dict(zip(KV_DTYPES, (np.float32, np.uint16, np.uint16, np.uint8, np.uint8), strict=True))


def _size(most: int, **default: int) -> Any:
    return field(metadata={"most": most}, **default)


@dataclass(frozen=True)
class ArenaSpec:
    """Sizes of an arena. Raises ArenaError if one is out of range. What does not fit together, such as the numbers of
    heads, is refused where the ring is opened."""

    num_layers: int = _size(1 << 16)  # L
    num_pages: int = _size((1 << 31) - 1)  # P, host pages per layer, with SGLang's padding page 0
    page_size: int = _size(2048)  # S, tokens per page
    num_kv_heads: int = _size(1024)  # H
    num_q_heads: int = _size(1 << 14)  # HQ, a multiple of H
    head_dim: int = _size(512)  # D, a multiple of 16
    kv_dtype: str  # one of KV_DTYPES
    scale: float  # softmax scale, a factor on q·k
    max_batch: int = _size(MAX_BATCH)  # rows of a record, a multiple of `lists`
    max_pages: int = _size(1 << 20)  # k, pages per row of a record
    num_nodes: int = _size(MAX_NODES, default=1)  # that the pages are on, see `stripe_pages`
    lists: int = _size(1024, default=1)  # page lists (rows) per request: 1, or H
    # C, pages of one KV head in each layer, after the host pages; on the last node.
    context_pages: int = _size((1 << 31) - 1, default=0)
    # Of the queries in a record and the output in its reply, one of QUERY_DTYPES: bfloat16 for a model in bf16.
    # Log-sum-exp is fp32 always.
    q_dtype: str = "float32"
    checksums: bool = False  # of each page and layer, see PageChecksums

    def __post_init__(self) -> None:
        for size in (x for x in fields(self) if x.metadata):
            value, least = getattr(self, size.name), int(size.default != 0)
            if not least <= value <= size.metadata["most"]:
                raise ArenaError(f"{size.name}={value} is outside {least}..{size.metadata['most']}")
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
        return self.num_q_heads // self.lists

    @property
    def stripe_pages(self) -> int:
        """Pages per node in every plane: page i is on node ``i // stripe_pages``.

        One contiguous stripe per node keeps the number of mappings far below the limit of a process (65530). Rounded to
        whole huge pages if that costs no node more than an eighth of its share.
        """
        share = -(-self.num_pages // self.num_nodes)
        whole = HUGE_PAGE_BYTES // math.gcd(self.page_bytes, HUGE_PAGE_BYTES)
        if self.num_nodes == 1 or 8 * whole * (self.num_nodes - 1) > share:
            return share
        return -(-share // whole) * whole

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all pages of all layers."""
        context_bytes = self.context_pages * (self.page_bytes // self.num_kv_heads)
        return 2 * self.num_layers * (self.num_pages * self.page_bytes + context_bytes)

    def bytes_by_node(self, numa_nodes: Sequence[int], align_bytes: int) -> dict[int | None, int]:
        """Bytes of the arena, under None, and of them on each node; arguments as of :func:`node_spans`."""
        found: dict[int | None, int] = {None: layout_of(self).total_bytes}
        for _, nbytes, node in node_spans(self, numa_nodes, align_bytes):
            found[node] = found.get(node, 0) + nbytes
        return found

    def most_pages(self, fits: Callable[[ArenaSpec], bool]) -> int:
        """The most host pages, fewer than these, with which such an arena fits; 0 if none do."""

        def too_many(pages: int) -> bool:
            # A share of the pages, rounded by whoever chose it.
            context = self.context_pages * pages // self.num_pages + self.num_kv_heads
            context = min(context, self.context_pages)
            return not fits(replace(self, num_pages=pages, context_pages=context))

        return bisect_left(range(1, self.num_pages), True, key=too_many)

    def flag_of(self, num_pages: int, arenas: int = 1) -> str:
        """The value of --kv-offload-host-gb for so many pages, the first one being SGLang's padding."""
        return flag_gib(arenas * max(num_pages - 1, 0) * 2 * self.num_layers * self.page_bytes)

    def describe(self) -> str:
        layout = layout_of(self)
        return (
            f"host memory of {gib(layout.total_bytes)}: {gib(self.kv_bytes)} for {self.num_pages} host pages of "
            f"{self.num_layers} layers, {gib(layout.kv_offset)} for CPU attention"
        )


_SIZES = [x.name for x in fields(ArenaSpec) if x.name not in ("kv_dtype", "q_dtype", "checksums")]


def header_of(spec: ArenaSpec) -> np.ndarray:
    header = np.zeros(1, HEADER_DTYPE)
    for name in _SIZES:
        header[name] = getattr(spec, name)
    header["dtype"] = KV_DTYPES.index(spec.kv_dtype)
    header["q_dtype"] = QUERY_DTYPES.index(spec.q_dtype)
    header["stripe_pages"] = spec.stripe_pages
    header["checksums_offset"] = spec.checksums  # a flag, replaced by the offset in ring_lay_out
    _native.ring_lay_out(header.ctypes.data)
    return header


def layout_of(spec: ArenaSpec) -> SimpleNamespace:
    """The fields of ring.h's Header as numbers: the sizes, and offsets and strides in bytes."""
    header = header_of(spec)[0]
    return SimpleNamespace(**{name: header[name].item() for name in HEADER_DTYPE.names or ()})


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
    spec: ArenaSpec, numa_nodes: Sequence[int], align_bytes: int
) -> list[tuple[int, int, int]]:
    """Memory spans by node: (offset, bytes, node), in order, without gaps. The ring is on the first node. A system page
    of ``align_bytes`` that has host pages of two nodes is bound to the second. ``numa_nodes``: the system's ids of the
    nodes of the spec, in order; none: nothing is bound."""
    if not numa_nodes:
        return []
    layout = layout_of(spec)
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


class Split(NamedTuple):
    """Parameters of the rule in ``sgl-kernel/src/split.h``, which splits the pages of a batch among threads."""

    threads: int = 1  # that serve the batch; with several NUMA nodes those of one of them
    max_splits: int = 1  # of a sequence, each for one thread
    # Of a split of the longest sequence; with several nodes of all splits together.
    min_pages: int = 1


def split_of(spec: ArenaSpec, node_cpus: int) -> Split:
    """The rule for an arena; ``node_cpus``: of the NUMA node that has the fewest."""
    list_bytes = 2 * spec.page_bytes // spec.lists  # of a page
    min_pages = _native.min_split_pages(list_bytes) * spec.num_nodes
    return Split(node_cpus, min(node_cpus, MAX_THREADS_PER_GROUP), min_pages)


def worker_memory(spec: ArenaSpec, node_cpus: Sequence[int]) -> list[tuple[str, int, int]]:
    """Host memory that a worker needs in addition to the pages, however many they are: (what, count, bytes).

    ``node_cpus``: the worker's on each NUMA node.
    """
    nodes, threads = spec.num_nodes, split_of(spec, min(node_cpus)).max_splits
    # The arena without pages: requests, replies, events.
    rows = [("ring", spec.max_batch // spec.lists, layout_of(spec).kv_offset)]
    # Partial results of threads that share a sequence, allocated lazily: for each record that may be in flight one
    # result per sequence, node and run of the largest record, unless there is only one.
    result_bytes = _native.partial_bytes(spec.num_layers, 1, spec.row_heads, spec.head_dim, 2) // 2
    max_splits = min(spec.max_batch * threads, _native.SPLITS_PER_THREAD * min(node_cpus))
    shared = max_splits if threads > 1 else 0
    if results := nodes * max(shared, spec.max_batch if nodes > 1 else 0):
        rows.append(("partial results", threads, results * result_bytes))
    return rows
