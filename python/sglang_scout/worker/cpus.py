"""Assigns CPUs to each tensor-parallel rank's worker, and leaves some to the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def core_of(cpu: int) -> int:
    """The first SMT sibling of ``cpu``; itself if the kernel does not tell."""
    try:
        siblings = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return cpu
    first = re.match(r"\d+", siblings)
    return int(first[0]) if first else cpu


LEFT_CPUS = 2
"""Minimum CPUs left to the server's own threads: the scheduler thread, and those of transfers."""
ROOMY_CORES = 8
"""From this many cores on, two are left, so that the thread that a step waits for has its own core."""


def reserve_server_cores(
    cpus: Collection[int], core_of: Callable[[int], int] = core_of
) -> list[int]:
    """Those of ``cpus`` for spinning threads, leaving some for the server.

    Whole cores are left, the first ones: a spinning thread slows its SMT sibling. If there are too few
    CPUs, none are left.
    """
    if len(cpus) < 2 * LEFT_CPUS:
        return sorted(cpus)
    units = _by_core(cpus, core_of)
    left = 2 if len(units) >= ROOMY_CORES else 1
    while len(sum(units[:left], [])) < LEFT_CPUS:
        left += 1
    if left == len(units):
        return sorted(cpus)[LEFT_CPUS:]
    return sorted(sum(units[left:], []))


def background_cpus(
    cpus: Collection[int],
    workers: Collection[int],
    nodes: Mapping[int, Collection[int]],
    core_of: Callable[[int], int] = core_of,
) -> list[int]:
    """Those of ``cpus`` for background work: none of ``workers``, and not the server's first core.

    Prefers CPUs on the workers' nodes, as page tables are allocated on the node of the thread that faults.

    Args:
        nodes: CPUs by NUMA node; empty if not known.
    Returns:
        Ascending; if only one core is left, all of it; empty if none is.
    """
    units = _by_core(set(cpus) - set(workers), core_of)
    free = sum(units[1:] or units, [])
    near = {
        cpu for of_node in nodes.values() if not set(workers).isdisjoint(of_node) for cpu in of_node
    }
    return sorted(near.intersection(free) or free)


def deal_cpus(
    cpus: Collection[int],
    homes: Sequence[Collection[int]],
    core_of: Callable[[int], int] = core_of,
) -> list[list[int]]:
    """Distribute ``cpus`` among the ranks, as close to each rank's device as possible.

    Ranks with the same home share its CPUs evenly. If homes overlap partially, or one has fewer CPUs than
    ranks, all ranks share all CPUs evenly instead. SMT siblings stay together if there are enough cores.

    Args:
        cpus: to be distributed.
        homes: per rank, the CPUs near its device.
    Returns:
        Per rank, ascending. Disjoint, unless there are fewer CPUs than ranks: then every rank gets all.
    """
    near = [frozenset(cpus) & frozenset(home) for home in homes]
    members = {home: [r for r, own in enumerate(near) if own == home] for home in near}
    if sum(map(len, members)) != len(frozenset().union(*members)) or any(
        len(home) < len(ranks) for home, ranks in members.items()
    ):
        members = {frozenset(cpus): list(range(len(homes)))}
    dealt: list[list[int]] = [[] for _ in homes]
    for home, ranks in members.items():
        for rank, part in zip(ranks, _split(home, len(ranks), core_of), strict=True):
            dealt[rank] = part
    return dealt


def _split(cpus: Collection[int], parts: int, core_of: Callable[[int], int]) -> list[list[int]]:
    units = _by_core(cpus, core_of)
    if len(units) < parts:
        units = [[cpu] for cpu in sorted(cpus)]
    if len(units) < parts:
        return [sorted(cpus)] * parts
    cuts = [len(units) * part // parts for part in range(parts + 1)]
    return [sorted(sum(units[cuts[p] : cuts[p + 1]], [])) for p in range(parts)]


def _by_core(cpus: Collection[int], core_of: Callable[[int], int]) -> list[list[int]]:
    cores: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(core_of(cpu), []).append(cpu)
    return list(cores.values())
