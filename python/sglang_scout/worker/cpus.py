"""Which CPUs each tensor-parallel rank's worker gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def core_of(cpu: int) -> int:
    """The first CPU of the core that ``cpu`` is a thread of; itself where the kernel does not say."""
    try:
        siblings = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return cpu
    first = re.match(r"\d+", siblings)
    return int(first[0]) if first else cpu


def deal_cpus(
    cpus: Collection[int],
    homes: Sequence[Collection[int]],
    core_of: Callable[[int], int] = core_of,
) -> list[list[int]]:
    """Deal ``cpus`` out to the ranks, each as near to its device as that goes.

    Ranks of one home share its CPUs evenly. Where homes overlap in part, or one has fewer CPUs than
    ranks, all ranks share all CPUs evenly instead. Threads of a core stay together if there are cores
    enough.

    Args:
        cpus: to be dealt out.
        homes: per rank, the CPUs near its device.
    Returns:
        Per rank, ascending. No CPU twice, but if there are fewer than ranks: then everybody has all.
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
    cores: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(core_of(cpu), []).append(cpu)
    units = list(cores.values())
    if len(units) < parts:
        units = [[cpu] for cpu in sorted(cpus)]
    if len(units) < parts:
        return [sorted(cpus)] * parts
    cuts = [len(units) * part // parts for part in range(parts + 1)]
    return [sorted(sum(units[cuts[p] : cuts[p + 1]], [])) for p in range(parts)]
