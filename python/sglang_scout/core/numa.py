"""What /sys says of this machine: CPUs, NUMA nodes, GPUs, RDMA; and Linux CPU lists."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from sglang_scout.core.errors import ConfigError

SYS = Path("/sys")
_NODES = "devices/system/node"
_PCI = "bus/pci/devices"
_ANY_CPU = set(range(1 << 16))
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class 03: display controllers, 0302 for those without a screen
# Stricter than int(), which also accepts 1_0, +0 and digits of other scripts.
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?")


def parse_cpu_list(
    text: str, available: set[int] | None = None, flag: str = "--kv-offload-cpus"
) -> tuple[int, ...]:
    """Parse a Linux CPU list such as ``0-3,8`` into sorted CPU numbers.

    Args:
        available: CPUs that this process may run on; None: ask the kernel.
        flag: the source of ``text``, for the message.
    Raises:
        ConfigError: not a list, or a CPU that does not exist here.
    """
    cpus: set[int] = set()
    what = f"{flag} {text!r}"
    for part in map(str.strip, text.split(",")):
        if (found := _RANGE.fullmatch(part)) is None:
            fix = "write for example 0-3,8"
            raise ConfigError(f"{what}: {part!r} is not a CPU number or a range; {fix}")
        low, high = int(found[1]), int(found[2] or found[1])
        if high < low:
            raise ConfigError(f"{what}: {part!r} is not an ascending range; write {high}-{low}")
        cpus.update(range(low, high + 1))
    if available is None:
        available = os.sched_getaffinity(0)
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
    by_node = {node: sorted({*cpus} & {*read_cpus(folder(node) / "cpulist")}) for node in nodes()}
    found = {node: members for node, members in by_node.items() if members}
    return found if sum(map(len, found.values())) == len(cpus) else {}


def read_meminfo(file: Path) -> dict[str, int]:
    """Bytes by name, of the machine or of a node; empty if the kernel does not tell."""
    found = re.findall(r"(\S+):\s+(\d+) kB$", read(file), re.MULTILINE)
    return {name: 1024 * int(kib) for name, kib in found}
