"""What the kernel says about this machine, read from /sys and /proc; nothing is changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_scout.core.cpu_list import parse_cpu_list

SYS = Path("/sys")
SHMEM_MODES_THAT_HELP = ("always", "within_size", "advise", "force")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class 03: display controllers, 0302 for those without a screen
_ADD_SEALS = 1033
_ALL_BUT_WRITE = 0x1 | 0x2 | 0x4


@dataclass(frozen=True)
class Gpu:
    """A PCI device. ``numa_node`` is -1 where the machine has one node or does not say."""

    address: str
    numa_node: int


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def numa_nodes() -> dict[int, list[int]]:
    """NUMA nodes that have CPUs, and these."""
    nodes = {}
    for folder in (SYS / "devices/system/node").glob("node[0-9]*"):
        text = _read(folder / "cpulist")
        if text:
            everything = set(range(1 << 16))
            nodes[int(folder.name[4:])] = list(parse_cpu_list(text, everything))
    return dict(sorted(nodes.items()))


def nvidia_gpus() -> list[Gpu]:
    """NVIDIA display controllers on the PCI bus, by address."""
    found = []
    for device in sorted((SYS / "bus/pci/devices").glob("*")):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY):
            found.append(Gpu(device.name, int(_read(device / "numa_node") or -1)))
    return found


def cpu_quota() -> float | None:
    """CPUs that the control group grants; None without a limit."""
    quota, _, period = _read(SYS / "fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota = _read(SYS / "fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read(SYS / "fs/cgroup/cpu/cpu.cfs_period_us")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        cpus = int(quota) / int(period)
        return cpus if cpus > 0 else None
    return None


def free_hugepages() -> int:
    """Free pages of the 2 MiB pool that nobody has reserved."""
    pool = SYS / "kernel/mm/hugepages/hugepages-2048kB"
    with contextlib.suppress(ValueError):
        return int(_read(pool / "free_hugepages")) - int(_read(pool / "resv_hugepages"))
    return 0


def shmem_hugepage_mode() -> str:
    """The chosen word of shmem_enabled; "" where the kernel has no transparent huge pages."""
    match = re.search(r"\[(\w+)\]", _read(SYS / "kernel/mm/transparent_hugepage/shmem_enabled"))
    return match[1] if match else ""


def has_rdma() -> bool:
    with contextlib.suppress(OSError):
        return any((SYS / "class/infiniband").iterdir())
    return False


def try_sealed_memfd() -> None:
    """Makes and drops a memory file as the arena does. Raises OSError where it cannot be made."""
    fd = os.memfd_create("sglang-scout-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, _ADD_SEALS, _ALL_BUT_WRITE)
    finally:
        os.close(fd)
