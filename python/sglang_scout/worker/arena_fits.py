"""Checks that an arena fits into memory, on the machine and on each NUMA node."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from sglang_scout.core.errors import ArenaError
from sglang_scout.worker import host_memory, numa
from sglang_scout.worker.host_memory import gib
from sglang_scout.worker.ring import Layout, layout_of, node_spans
from sglang_scout.worker.spec import ArenaSpec


def check_fits(spec: ArenaSpec, layout: Layout) -> None:
    available = host_memory.available_bytes()
    if layout.total_bytes <= available:
        return
    fitting = bisect_right(
        range(1, spec.num_pages),
        available,
        key=lambda pages: layout_of(replace(spec, num_pages=pages)).total_bytes,
    )
    raise ArenaError(
        f"{describe(spec, layout)} does not fit: {gib(available)} of host memory are available; "
        f"lower num_pages={spec.num_pages} to at most {fitting}"
    )


def needed_of_nodes(
    spec: ArenaSpec, layout: Layout, numa_nodes: Sequence[int], page_bytes: int
) -> dict[int, int]:
    """Bytes that each node would hold; empty if nothing is bound."""
    if not numa_nodes or len(numa.nodes()) <= 1:
        return {}
    needed = dict.fromkeys(numa_nodes, 0)
    for _, nbytes, node in node_spans(spec, layout, numa_nodes, page_bytes):
        needed[node] += nbytes
    return needed


def check_nodes_fit(spec: ArenaSpec, layout: Layout, numa_nodes: Sequence[int]) -> None:
    """Memory bound to a node cannot fall back to others, so each node must have enough."""
    needed = needed_of_nodes(spec, layout, numa_nodes, mmap.PAGESIZE)
    for node, nbytes in needed.items():
        available = numa.available_bytes(node)
        if available is not None and nbytes > available:
            raise ArenaError(
                f"{describe(spec, layout)} is bound to NUMA nodes {list(numa_nodes)}: node "
                f"{node} would hold {gib(nbytes)} and has {gib(available)}; give the arena less "
                "memory, or the worker no CPUs of that node"
            )


def describe(spec: ArenaSpec, layout: Layout) -> str:
    return (
        f"an arena of {gib(layout.total_bytes)} (KV {gib(spec.kv_bytes)}: {spec.num_layers} "
        f"layers x {spec.num_pages} pages x 2 x {spec.page_bytes} bytes; ring {gib(layout.kv_offset)})"
    )
