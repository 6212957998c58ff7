"""Whether an arena fits: into the hugetlb pool, or into memory, on the machine and on each NUMA node."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_scout.core.errors import ArenaError
from sglang_scout.worker import host_memory, numa
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, LAST_RESORT, flag_gib, gib
from sglang_scout.worker.ring import Layout, layout_of, node_spans
from sglang_scout.worker.spec import ArenaSpec


def check_fits(spec: ArenaSpec, layout: Layout) -> None:
    available = host_memory.available_bytes()
    if layout.total_bytes <= available:
        return
    fitting = most_pages(spec, lambda smaller: layout_of(smaller).total_bytes <= available)
    raise ArenaError(
        f"{describe(spec, layout)} does not fit: {gib(available)} of host memory are available; "
        f"lower num_pages={spec.num_pages} to at most {fitting}; {LAST_RESORT}"
    )


def most_pages(spec: ArenaSpec, fits: Callable[[ArenaSpec], bool]) -> int:
    """The most pages, less than in ``spec``, with which such an arena ``fits``; 0 if none do."""

    def too_many(pages: int) -> bool:
        # A share of the pages, rounded by whoever chose it.
        context = spec.context_pages * pages // spec.num_pages + spec.num_kv_heads
        context_pages = min(context, spec.context_pages)
        return not fits(replace(spec, num_pages=pages, context_pages=context_pages))

    return bisect_left(range(1, spec.num_pages), True, key=too_many)


def pool_lacks(spec: ArenaSpec, numa_nodes: Sequence[int] = (), arenas: int = 1) -> str:
    """What the hugetlb pool lacks for ``arenas`` such arenas, on each of these nodes too; "" if it has all pages.

    Raises:
        ArenaError: it has half of them, not all: a pool that large was reserved for the arena.
    """
    of_pool = pool_demand(spec, numa_nodes, arenas)
    node = min(of_pool, key=lambda node: of_pool[node][1] / of_pool[node][0])
    needed, free, total = of_pool[node]
    if free >= needed:
        return ""
    where = "" if node is None else f" on NUMA node {node}"
    short = (
        f"{describe(spec, layout_of(spec))}{f' on each of {arenas} ranks' if arenas > 1 else ''} needs {needed} huge "
        f"pages of 2 MiB{where}, and {free} are free in the pool"
    )
    if 2 * free < needed:
        return short
    wanted = total + needed - free
    fix = f"run sysctl vm.nr_hugepages={wanted}"
    if node is not None:
        fix = f"write {wanted} to {numa.pool_folder(node)}/nr_hugepages"
    fitting = most_pages(spec, lambda smaller: pool_fits(smaller, numa_nodes, arenas))
    kv_bytes = arenas * max(fitting - 1, 0) * 2 * spec.num_layers * spec.page_bytes
    raise ArenaError(f"{short}; {fix}, or set --kv-offload-host-gb {flag_gib(kv_bytes)}")


def pool_fits(spec: ArenaSpec, numa_nodes: Sequence[int] = (), arenas: int = 1) -> bool:
    of_pool = pool_demand(spec, numa_nodes, arenas)
    return all(free >= needed for needed, free, _ in of_pool.values())


def pool_demand(
    spec: ArenaSpec, numa_nodes: Sequence[int], arenas: int
) -> dict[int | None, tuple[int, int, int]]:
    """Huge pages that arenas need, and that the pool has free and in all; by node, and under None of all nodes."""
    layout = layout_of(spec)
    needed = needed_of_nodes(spec, layout, numa_nodes, HUGE_PAGE_BYTES)
    return {
        node: (arenas * -(-nbytes // HUGE_PAGE_BYTES), *numa.pool_pages(node))
        for node, nbytes in {None: layout.total_bytes, **needed}.items()
    }


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
                f"{node} would hold {gib(nbytes)} and has {gib(available)}; lower "
                f"--kv-offload-host-gb, or name no CPUs of that node in --kv-offload-cpus; {LAST_RESORT}"
            )


def bytes_now(numa_nodes: Sequence[int]) -> int:
    """What can be had at the moment by an arena that is divided among these nodes."""
    bound = numa_nodes if len(numa.nodes()) > 1 else ()
    of_nodes = [now for node in bound if (now := numa.bytes_now(node)) is not None]
    return min([host_memory.bytes_now(), *(len(bound) * now for now in of_nodes)])


def describe(spec: ArenaSpec, layout: Layout) -> str:
    return (
        f"an arena of {gib(layout.total_bytes)} (KV {gib(spec.kv_bytes)}: {spec.num_layers} "
        f"layers x {spec.num_pages} pages x 2 x {spec.page_bytes} bytes; ring {gib(layout.kv_offset)})"
    )
