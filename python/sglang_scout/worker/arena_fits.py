"""Whether an arena fits: into the hugetlb pool, or into memory, on the machine and on each NUMA node."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_scout.core import numa
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker import host_memory
from sglang_scout.worker.host_memory import HUGE_PAGE_BYTES, LAST_RESORT, flag_gib, gib
from sglang_scout.worker.ring import ArenaSpec, layout_of, node_spans


@dataclass(frozen=True)
class Place:
    """Where the memory of arenas is to come from."""

    page_bytes: int  # of the system's pages there
    free_bytes: Callable[[int | None], int]  # for arenas on a node, or for None on the machine
    nodes: Sequence[int] = ()  # that it is bound to; each must have enough, as it cannot fall back
    arenas: int = 1  # of one size, one of each rank

    def shortest(self, spec: ArenaSpec) -> tuple[int | None, int, int]:
        """Where the least is free of what is needed: (node, bytes needed, bytes free)."""
        layout = layout_of(spec)
        needed: dict[int | None, int] = {None: layout.total_bytes}
        if self.nodes and len(numa.nodes()) > 1:
            needed |= dict.fromkeys(self.nodes, 0)
            for _, nbytes, node in node_spans(spec, layout, self.nodes, self.page_bytes):
                needed[node] += nbytes
        page = self.page_bytes
        found = [
            (node, self.arenas * -(-nbytes // page) * page, self.free_bytes(node))
            for node, nbytes in needed.items()
        ]
        return min(found, key=lambda of_node: of_node[2] / max(of_node[1], 1))

    def has(self, spec: ArenaSpec) -> bool:
        _, needed, free = self.shortest(spec)
        return free >= needed

    def max_pages(self, spec: ArenaSpec) -> int:
        """The most pages, less than in ``spec``, with which such arenas fit; 0 if none do."""

        def too_many(pages: int) -> bool:
            # A share of the pages, rounded by whoever chose it.
            context = spec.context_pages * pages // spec.num_pages + spec.num_kv_heads
            context_pages = min(context, spec.context_pages)
            return not self.has(replace(spec, num_pages=pages, context_pages=context_pages))

        return bisect_left(range(1, spec.num_pages), True, key=too_many)


def pool(nodes: Sequence[int] = (), arenas: int = 1) -> Place:
    return Place(HUGE_PAGE_BYTES, host_memory.free_pool_bytes, nodes, arenas)


def check_fits(spec: ArenaSpec, nodes: Sequence[int]) -> None:
    """Raises ArenaError if memory outside of the pool has no room for it."""
    place = Place(mmap.PAGESIZE, host_memory.available_bytes, nodes)
    node, needed, free = place.shortest(spec)
    if needed <= free:
        return
    if node is None:
        what = f"{describe(spec)} does not fit: {gib(free)} of host memory are available"
        fix = f"lower num_pages={spec.num_pages} to at most {place.max_pages(spec)}"
    else:
        what = (
            f"{describe(spec)} is bound to NUMA nodes {list(nodes)}: node {node} would hold {gib(needed)} and has "
            f"{gib(free)}"
        )
        fix = "lower --kv-offload-host-gb, or name no CPUs of that node in --kv-offload-cpus"
    raise ArenaError(f"{what}; {fix}; {LAST_RESORT}")


def pool_lacks(spec: ArenaSpec, nodes: Sequence[int] = (), arenas: int = 1) -> str:
    """What the hugetlb pool lacks for ``arenas`` such arenas, on each of these nodes too; "" if it has all pages.

    Raises:
        ArenaError: it has half of them, not all: a pool that large was reserved for the arena.
    """
    place = pool(nodes, arenas)
    node, needed, free = place.shortest(spec)
    if free >= needed:
        return ""
    needed, free = needed // HUGE_PAGE_BYTES, free // HUGE_PAGE_BYTES
    short = (
        f"{describe(spec)}{f' on each of {arenas} ranks' if arenas > 1 else ''} needs {needed} huge pages of 2 MiB"
        f"{'' if node is None else f' on NUMA node {node}'}, and {free} are free in the pool"
    )
    if 2 * free < needed:
        return short
    wanted = host_memory.pool_pages(node)[1] + needed - free
    fix = f"run sysctl vm.nr_hugepages={wanted}"
    if node is not None:
        fix = f"write {wanted} to {host_memory.pool_folder(node)}/nr_hugepages"
    kv_bytes = arenas * max(place.max_pages(spec) - 1, 0) * 2 * spec.num_layers * spec.page_bytes
    raise ArenaError(f"{short}; {fix}, or set --kv-offload-host-gb {flag_gib(kv_bytes)}")


def bytes_now(nodes: Sequence[int]) -> int:
    """What can be had at the moment by an arena that is divided among these nodes."""
    bound = nodes if len(numa.nodes()) > 1 else ()
    on_nodes = (len(bound) * host_memory.bytes_now(node) for node in bound)
    return min([host_memory.bytes_now(), *on_nodes])


def describe(spec: ArenaSpec) -> str:
    layout = layout_of(spec)
    return (
        f"an arena of {gib(layout.total_bytes)} (KV {gib(spec.kv_bytes)}: {spec.num_layers} "
        f"layers x {spec.num_pages} pages x 2 x {spec.page_bytes} bytes; ring {gib(layout.kv_offset)})"
    )
