"""What /sys says of this machine: CPUs, NUMA nodes, GPUs, RDMA."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sglang_scout.core.cpu_list import parse_cpu_list

SYS = Path("/sys")
_NODES = "devices/system/node"
_PCI = "bus/pci/devices"
_ANY_CPU = set(range(1 << 16))
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class 03: display controllers, 0302 for those without a screen


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


def read_cpus(path: str) -> list[int]:
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
    with contextlib.suppress(ValueError, ZeroDivisionError):
        cpus = int(quota) / int(period)
        return cpus if cpus > 0 else None
    return None


def nvidia_gpus() -> list[str]:
    """PCI addresses of NVIDIA display controllers."""
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
    found = {}
    for node in nodes():
        if members := sorted(set(cpus).intersection(read_cpus(f"{folder(node)}/cpulist"))):
            found[node] = members
    return found if sum(map(len, found.values())) == len(cpus) else {}


def hardware() -> list[dict[str, Any]]:
    """What ``numactl --hardware`` says of each node; bytes are None and distances empty if the kernel does not tell."""
    found = []
    for node in nodes():
        memory, cpus = read_meminfo(folder(node) / "meminfo"), read_cpus(f"{folder(node)}/cpulist")
        sizes = {"total_bytes": memory.get("MemTotal"), "free_bytes": memory.get("MemFree")}
        distances = list(map(int, read(folder(node) / "distance").split()))
        found.append({"node": node, "cpus": cpus, **sizes, "distances": distances})
    return found


def read_meminfo(file: Path) -> dict[str, int]:
    """Bytes by name, of the machine or of a node; empty if the kernel does not tell."""
    found = re.findall(r"(\S+):\s+(\d+) kB$", read(file), re.MULTILINE)
    return {name: 1024 * int(kib) for name, kib in found}
