"""NUMA binding of a mapping by the mbind system call. Nothing here needs libnuma."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection
from pathlib import Path

from sglang_scout.core.errors import ArenaError

logger = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes() -> list[int]:
    """NUMA nodes of this machine, ascending; empty if the kernel knows none."""
    found = (p.name[4:] for p in _NODES.glob("node*"))
    return sorted(int(name) for name in found if name.isdigit())


def node_of(cpus: Collection[int]) -> int | None:
    """The NUMA node that all of ``cpus`` belong to; None if they are of several or of none."""
    for node in nodes():
        members = (_NODES / f"node{node}" / "cpumap").read_text().replace(",", "")
        mask = int(members, 16)
        if cpus and all(mask >> cpu & 1 for cpu in cpus):
            return node
    return None


def bind_memory(address: int, nbytes: int, node: int) -> bool:
    """Binds a mapping to a node: its pages, not yet touched, will come from there.

    For shared memory the policy belongs to the file, so it also holds for other processes' faults.

    Returns:
        False where there is nothing to bind: one node or none, or a kernel or sandbox without
        mbind. That is logged.

    Raises:
        ArenaError: the machine has several nodes and ``node`` is none of them.
    """
    known = nodes()
    if len(known) <= 1:
        logger.info("arena: machine has no second NUMA node, memory is not bound to node %d", node)
        return False
    if node not in known:
        raise ArenaError(f"numa_node={node}; this machine has {known}")
    number = _MBIND.get(platform.machine())
    if number is None:
        logger.warning("arena: mbind is unknown on %s, memory is not bound", platform.machine())
        return False
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << (node % _BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    rc = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(words * _BITS + 1),
        ctypes.c_uint(0),
    )
    if rc != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.warning("arena: cannot bind memory to NUMA node %d: %s", node, reason)
        return False
    return True
