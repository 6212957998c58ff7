"""CPU and NUMA topology from /sys, and the system calls for memory policy, without libnuma."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.core.errors import ArenaError

logger = logging.getLogger(__name__)

SYS = Path("/sys")
_NODES = "devices/system/node"
_ANY_CPU = set(range(1 << 16))
_MBIND = {"x86_64": 237, "aarch64": 235}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes() -> list[int]:
    """NUMA nodes of this machine, ascending; empty without NUMA support in the kernel."""
    found = (p.name[4:] for p in (SYS / _NODES).glob("node*"))
    return sorted(int(name) for name in found if name.isdigit())


def folder(node: int) -> Path:
    return SYS / _NODES / f"node{node}"


def read_cpus(path: str) -> list[int]:
    """The CPU list in a file of /sys, ascending; empty if there is no such file."""
    try:
        text = (SYS / path).read_text().strip()
    except OSError:
        return []
    return list(parse_cpu_list(text, _ANY_CPU)) if text else []


def near_cpus(pci_address: str) -> list[int]:
    """CPUs on the node of a PCI device, as ``0000:01:00.0``; empty if the kernel does not tell."""
    return read_cpus(f"bus/pci/devices/{pci_address}/local_cpulist")


def cpus_by_node(cpus: Collection[int]) -> dict[int, list[int]]:
    """``cpus`` grouped by NUMA node, nodes without any left out.

    Nodes and CPUs ascend. Empty if one of ``cpus`` is on no node, or without NUMA support in the kernel.
    """
    found = {}
    for node in nodes():
        if members := sorted(set(cpus).intersection(read_cpus(f"{folder(node)}/cpulist"))):
            found[node] = members
    return found if sum(map(len, found.values())) == len(cpus) else {}


def hardware() -> list[dict[str, Any]]:
    """What ``numactl --hardware`` says, a node each: its CPUs, memory, and distances to the nodes in order.

    Bytes are None and distances empty if the kernel does not tell.
    """
    found = []
    for node in nodes():
        memory, distance = read_meminfo(folder(node) / "meminfo"), folder(node) / "distance"
        text = distance.read_text() if distance.exists() else ""
        found.append(
            {
                "node": node,
                "cpus": read_cpus(f"{folder(node)}/cpulist"),
                "total_bytes": memory.get("MemTotal"),
                "free_bytes": memory.get("MemFree"),
                "distances": list(map(int, text.split())),
            }
        )
    return found


def read_meminfo(file: Path) -> dict[str, int]:
    """Bytes by name, of the machine or of a node; empty if the kernel does not tell."""
    try:
        text = file.read_text()
    except OSError:
        return {}
    return {k: 1024 * int(n) for k, n in re.findall(r"(\S+):\s+(\d+) kB$", text, re.MULTILINE)}


def bind_memory(address: int, spans: Iterable[tuple[int, int, int]]) -> bool:
    """Binds spans of a mapping, not yet touched, to nodes from which their pages will be allocated.

    For shared memory the policy belongs to the file, so it also applies to other processes' faults.

    Args:
        address: of the mapping.
        spans: (offset, bytes, node) each.

    Returns:
        False if nothing was bound (logged): at most one node, or a kernel or sandbox without mbind.

    Raises:
        ArenaError: the machine has several nodes, and one of those requested does not exist.
    """
    spans = list(spans)
    asked = sorted({node for _, _, node in spans})
    known = nodes()
    if len(known) <= 1:
        logger.info("arena: machine has no second NUMA node, memory is not bound to %s", asked)
        return False
    if not set(asked) <= set(known):
        raise ArenaError(f"numa_nodes={asked}; this machine has {known}")
    if platform.machine() not in _MBIND:
        logger.warning("arena: mbind is unknown on %s, memory is not bound", platform.machine())
        return False
    for offset, nbytes, node in spans:
        if error := _mbind(address + offset, nbytes, node):
            reason = os.strerror(error)
            logger.warning("arena: cannot bind memory to NUMA node %d: %s", node, reason)
            return False
    logger.info("arena: memory is bound to NUMA nodes %s", asked)
    return True


def use_own_node() -> None:
    """Resets the memory policy of this thread, and of those that it starts, to the local node.

    A process inherits its parent's policy, and SGLang starts a scheduler with ``numactl --membind``.
    No-op without NUMA support or if a sandbox blocks the call.
    """
    if number := _SET_MEMPOLICY.get(platform.machine()):
        default = ctypes.c_long(number), ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0)
        ctypes.CDLL(None).syscall(*default)


def _mbind(address: int, nbytes: int, node: int) -> int:
    """The system call; 0 or an errno."""
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << (node % _BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    rc = libc.syscall(
        ctypes.c_long(_MBIND[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(words * _BITS + 1),
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if rc != 0 else 0
