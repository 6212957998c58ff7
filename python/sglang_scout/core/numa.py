"""What /sys says of this machine: CPUs, NUMA nodes, GPUs, RDMA. Which CPUs the attention threads of each rank take, and
what is left to the server. Linux CPU lists."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_scout.core.errors import ConfigError

LEFT_CPUS = 2  # at least, to the server's own threads: the scheduler's, and those of transfers
ROOMY_CORES = 8  # from which two are left, so that the thread that a step waits for has its own
# Of a rank. From this many cores on, their SMT siblings stay free: 16 threads draw most of a socket's memory
# bandwidth, by which attention is bound. Not measured on a machine with SMT.
ENOUGH_THREADS = 16
ATTENTION = "attention threads, one each"

SYS = Path("/sys")
_NODES, _PCI = "devices/system/node", "bus/pci/devices"
_ANY_CPU = set(range(1 << 16))
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI class 03: display controllers, 0302 without a screen
# Stricter than int(), which also accepts 1_0, +0 and digits of other scripts.
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?")


def parse_cpu_list(
    text: str, available: set[int] | None = None, flag: str = "--kv-offload-cpus"
) -> tuple[int, ...]:
    """Parse a Linux CPU list such as ``0-3,8`` into sorted CPU numbers. Raises ConfigError if it is none, or for a CPU
    that this process may not run on (``available``; None: ask the kernel)."""
    cpus: set[int] = set()
    what = f"{flag} {text!r}"
    for part in map(str.strip, text.split(",")):
        if (found := _RANGE.fullmatch(part)) is None:
            raise ConfigError(f"{what}: {part!r} is no CPU number and no range; write as 0-3,8")
        low, high = int(found[1]), int(found[2] or found[1])
        if high < low:
            raise ConfigError(f"{what}: {part!r} is not an ascending range; write {high}-{low}")
        cpus.update(range(low, high + 1))
    available = os.sched_getaffinity(0) if available is None else available
    if absent := cpus - available:
        raise ConfigError(
            f"{what}: this process may not run on CPU {min(absent)}; available are {ranges(available)}"
        )
    return tuple(sorted(cpus))


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as a Linux list, ascending: 0-3,8."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda at: at[1] - at[0]):
        first, *more = (str(number) for _, number in run)
        parts.append(f"{first}-{more[-1]}" if more else first)
    return ",".join(parts)


def read(path: str | Path) -> str:
    """A file of /sys, or one given in full; empty where it cannot be read."""
    try:
        return (SYS / path).read_text().strip()
    except OSError:
        return ""


def nodes() -> list[int]:
    """NUMA nodes of this machine, ascending; empty without NUMA support in the kernel."""
    return sorted(int(p.name[4:]) for p in (SYS / _NODES).glob("node[0-9]*"))


def folder(node: int) -> Path:
    return SYS / _NODES / f"node{node}"


def read_cpus(path: str | Path) -> list[int]:
    """The CPU list in a file of /sys, ascending; empty if there is no such file."""
    text = read(path)
    return list(parse_cpu_list(text, _ANY_CPU)) if text else []


def core_of(cpu: int) -> int:
    """The first SMT sibling of ``cpu``; itself if the kernel does not tell."""
    siblings = read_cpus(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return min(siblings, default=cpu)


def cpu_quota() -> float | None:
    """CPU quota of the control group; None without a limit."""
    quota, _, period = read("fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota, period = (read(f"fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    is_limit = quota.isdigit() and period.isdigit() and int(period)  # "max", or -1: none
    return int(quota) / int(period) or None if is_limit else None


def memory_limit_bytes() -> int | None:
    """Of the control group, as a container sees it; None without a limit."""
    limit = read("fs/cgroup/memory.max") or read("fs/cgroup/memory/memory.limit_in_bytes")
    return int(limit) if limit.isdigit() and int(limit) < 2**60 else None


def nvidia_gpus() -> list[str]:
    return [
        device.name
        for device in sorted((SYS / _PCI).glob("*"))
        if read(device / "vendor") == _NVIDIA and read(device / "class").startswith(_DISPLAY)
    ]


def has_rdma() -> bool:
    return any((SYS / "class/infiniband").glob("*"))


def node_of(pci_address: str) -> int:
    """NUMA node of a PCI device; -1 if there is one node, or the kernel does not tell."""
    return int(read(f"{_PCI}/{pci_address}/numa_node") or -1)


def near_cpus(pci_address: str) -> list[int]:
    """CPUs on the node of a PCI device, as ``0000:01:00.0``; empty if the kernel does not tell."""
    return read_cpus(f"{_PCI}/{pci_address}/local_cpulist")


def cpus_by_node(cpus: Collection[int]) -> dict[int, list[int]]:
    """``cpus`` by NUMA node, ascending, without nodes that have none. Empty if one of ``cpus`` is on no node."""
    by_node = {node: sorted({*cpus} & {*read_cpus(folder(node) / "cpulist")}) for node in nodes()}
    found = {node: members for node, members in by_node.items() if members}
    return found if sum(map(len, found.values())) == len(cpus) else {}


def read_meminfo(file: Path) -> dict[str, int]:
    """Bytes by name, of the machine or of a node; empty if the kernel does not tell."""
    found = re.findall(r"(\S+):\s+(\d+) kB$", read(file), re.MULTILINE)
    return {name: 1024 * int(kib) for name, kib in found}


class CpuUse(NamedTuple):
    cpus: str  # a list such as 0-3,8
    used_by: str
    why: str


class CpuPlan(NamedTuple):
    """The CPUs of a decode server's rank."""

    threads: list[int]  # an attention thread is pinned to each; SMT siblings of others last
    background: list[int]  # of background work; empty: any but these
    rows: list[CpuUse]  # each CPU of the machine in one of them
    warning: str  # empty if there is none


def plan_cpus(
    allowed: Collection[int],
    near: Collection[int] | None,
    given: Collection[int] | None = None,
    share: Collection[int] | None = None,
) -> CpuPlan:
    """Assign the machine's CPUs.

    Args:
        allowed: CPUs of this process.
        near: those on the GPU's NUMA node, empty if not known; None: the CPU device.
        given: by ``--kv-offload-cpus``: all are taken.
        share: of ``given`` or ``allowed``, by :func:`deal_cpus`; None: there is one rank.
    """
    allowed, local, warning = set(allowed), set(near or ()).intersection(allowed), ""
    home = sorted(share or given or local or allowed)
    threads, num_cores, free = home, len(home), []
    where = _nodes_of(home) + ("" if share is None else ", this rank's share")
    if given:
        why = "given by --kv-offload-cpus"
    elif near is None:
        why = f"CPU device: all of {where}"
    else:
        cores = _without_server_cores(home)
        # The first CPU of each core, then the second ones.
        order = [cpu for _, cpu in sorted((i, cpu) for of in cores for i, cpu in enumerate(of))]
        num_cores, count = len(cores), max(len(cores), ENOUGH_THREADS)
        threads, free = order[:count], order[count:]
        why = f"one per core of {where}" + (", near the GPU" if local & set(home) else "")
        if near and not local:
            warning = f"this process may run on none of the CPUs near the GPU ({ranges(near)})"
            why += f": {warning}"
    elsewhere, left = allowed.difference(home), set(home).difference(threads, free)
    # Not on what other ranks have been dealt.
    pool = allowed.difference(given).union(threads) if given else set(home)
    background = background_cpus(pool, threads)
    if share is not None:
        rest = ("the server and other ranks", "not this rank's share")
    elif given:
        rest = ("the server", "not given by --kv-offload-cpus")
    else:
        rest = ("not used", f"{_nodes_of(elsewhere)}, far from the GPU")
        rest = rest if left else ("the server", _nodes_of(elsewhere))
    online = set(read_cpus("devices/system/cpu/online"))
    keep = "scheduler, tokenizer, transfers: polling attention threads slow their SMT siblings"
    rows = [
        (threads[:num_cores], ATTENTION, why),
        (threads[num_cores:], ATTENTION, f"SMT siblings, for up to {ENOUGH_THREADS} threads"),
        (left.difference(background), "the server", keep),
        (left.intersection(background), "the server and background work", keep),
        (free, "background work", "SMT siblings: attention is bound by memory bandwidth"),
        (elsewhere.difference(background), *rest),
        (elsewhere.intersection(background), f"{rest[0]} and background work", rest[1]),
        (online - allowed, "not allowed", "outside this process's cpuset"),
    ]
    uses = [CpuUse(ranges(cpus), *of) for cpus, *of in rows if cpus]
    return CpuPlan(threads, background, uses, warning)


def _nodes_of(cpus: Collection[int]) -> str:
    nodes = [str(node) for node in cpus_by_node(cpus)]
    return f"NUMA node{'s' * (len(nodes) > 1)} {', '.join(nodes)}" if nodes else "this process"


def _without_server_cores(cpus: Collection[int]) -> list[list[int]]:
    """The cores of ``cpus`` for spinning threads, which slow their SMT siblings: the first ones are left to the server,
    or none of too few CPUs."""
    cores = _by_core(cpus)
    if len(cpus) < 2 * LEFT_CPUS:
        return cores
    left = 2 if len(cores) >= ROOMY_CORES else 1
    while len(sum(cores[:left], [])) < LEFT_CPUS:
        left += 1
    return cores[left:] or _by_core(sorted(cpus)[LEFT_CPUS:])


def background_cpus(cpus: Collection[int], workers: Collection[int]) -> list[int]:
    """Those of ``cpus`` for background work, ascending: none of ``workers``, nor the server's first core, unless it is
    the only one left.

    Prefers SMT siblings of the workers, which nothing else uses, then other CPUs on their nodes, as page tables are
    allocated on the node of the thread that faults.
    """
    cores, others = set(map(core_of, workers)), set(cpus).difference(workers)
    siblings = [cpu for cpu in others if core_of(cpu) in cores]
    units = _by_core(others.difference(siblings))
    free = sum(units[1:] or units, [])
    of_nodes = cpus_by_node(cpus).values()
    near = {cpu for of_node in of_nodes if not set(workers).isdisjoint(of_node) for cpu in of_node}
    return sorted(siblings or near.intersection(free) or free)


def deal_cpus(cpus: Collection[int], homes: Sequence[Collection[int]]) -> list[list[int]]:
    """Distribute ``cpus`` among the ranks, given for each the CPUs near its device, its home.

    Ranks with the same home share its CPUs evenly. If homes overlap partially, or one has fewer CPUs than ranks, all
    ranks share all CPUs evenly instead. SMT siblings stay together if there are enough cores. Per rank, ascending.
    Disjoint, unless there are fewer CPUs than ranks: then every rank gets all.
    """
    near = [frozenset(cpus) & frozenset(home) for home in homes]
    if sum(map(len, set(near))) > len(frozenset().union(*near)) or any(
        len(home) < near.count(home) for home in near
    ):
        near = [frozenset(cpus)] * len(homes)
    parts = {home: iter(_split(home, near.count(home))) for home in near}
    return [next(parts[home]) for home in near]


def _split(cpus: Collection[int], parts: int) -> list[list[int]]:
    units = _by_core(cpus)
    if len(units) < parts:
        units = [[cpu] for cpu in sorted(cpus)]
    if len(units) < parts:
        return [sorted(cpus)] * parts
    cuts = [len(units) * part // parts for part in range(parts + 1)]
    return [sorted(sum(units[a:b], [])) for a, b in itertools.pairwise(cuts)]


def _by_core(cpus: Collection[int]) -> list[list[int]]:
    cores: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(core_of(cpu), []).append(cpu)
    return list(cores.values())
