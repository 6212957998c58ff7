"""Host memory: how much an arena can have of the machine, of NUMA nodes and of the hugetlb pool; populating it before
the first access, binding it to nodes.

A virtual machine may start small and get the rest of its memory as it uses it: such growth counts as available, and
what relies on it is touched first. Where a first write would raise SIGBUS, as with an exhausted hugetlb pool,
MADV_POPULATE_WRITE returns an error instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_scout.core import numa
from sglang_scout.core.errors import ArenaError, ConfigError

if TYPE_CHECKING:
    from sglang_scout.worker.ring import ArenaSpec

logger = logging.getLogger(__name__)

OVERRIDE = "SGLANG_SCOUT_HOST_MEMORY_GB"
# Ends every refusal for want of host memory.
LAST_RESORT = f"as a last resort set {OVERRIDE}=N if you know that N GiB are available"
STEP_BYTES = 2 * 2**30  # of growth that is touched at once
KEPT_BYTES = 2**29  # left to everything else meanwhile
GROWTH_WAIT_S = 10.0
HUGE_PAGE_BYTES = 2 * 2**20
MAX_THREADS = 16  # enough to saturate memory bandwidth
PIECE_BYTES = 32 * 2**20
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # since Linux 5.14, not in the mmap module
_MBIND, _MPOL_BIND = 237, 2  # of x86-64
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_PROC, _SYS_MM = Path("/proc"), Path("/sys/kernel/mm")
SHMEM_MODES_THAT_HELP = ("always", "within_size", "advise", "force")
# For cgroup v2 and v1: file names of limits and usage, and the memory.stat key of reclaimable cache. Above
# memory.high a process is throttled until pages are reclaimed, and those of the arena cannot be.
_GROUP_FILES = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}
_libc = ctypes.CDLL(None, use_errno=True)  # calls release the GIL
for _call in (_libc.madvise, _libc.mprotect):
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def available_bytes(node: int | None = None) -> int:
    """Memory for a new arena outside of the hugetlb pool, on the machine or on a NUMA node: what ``OVERRIDE`` promises,
    or else :func:`bytes_now` and what there is room to grow by."""
    return promised_bytes() or bytes_now(node, grown=True)


def promised_bytes() -> int:
    """What ``OVERRIDE`` says, 0 if it is not set. Raises ConfigError."""
    if not (text := os.environ.get(OVERRIDE)):
        return 0
    with contextlib.suppress(ValueError):
        if 0.001 <= float(text) <= 2**20:
            return int(float(text) * 2**30)
    raise ConfigError(
        f"{OVERRIDE}={text}: must be the GiB of host memory that are available, 0.001 to {2**20}; correct it, "
        "or unset it"
    )


def bytes_now(node: int | None = None, grown: bool = False) -> int:
    """Of the machine MemAvailable, capped by the limits of this process's cgroup and its ancestors, and by the commit
    limit with ``vm.overcommit_memory=2``, beyond which a first write raises SIGBUS. Of a node what is free or cache.

    ``grown``: as if the machine had grown to its ``present`` pages beyond MemTotal, less a share for what the kernel
    keeps to itself (page structs alone are 1/64).
    """
    memory = {} if node is None else numa.read_meminfo(numa.folder(node) / "meminfo")
    # Also of a node of which the kernel does not tell.
    memory = memory or numa.read_meminfo(_PROC / "meminfo")
    growth = 0
    if grown:
        zones = rf"^Node {r'[0-9]+' if node is None else node}, zone.*?^ +present +(\d+)$"
        present = re.findall(zones, numa.read(_PROC / "zoneinfo"), re.MULTILINE | re.DOTALL)
        most = sum(map(int, present)) * mmap.PAGESIZE * 31 // 32
        growth = max(most - memory["MemTotal"], 0)
    if node is not None:
        return memory["MemFree"] + memory.get("Inactive(file)", 0) + growth
    left = [memory["MemAvailable"] + growth]
    if numa.read(_PROC / "sys/vm/overcommit_memory") == "2":
        left.append(memory["CommitLimit"] - memory["Committed_AS"])
    for kind, folder in _memory_groups():
        limits, used_name, cache_name = _GROUP_FILES[kind]
        with contextlib.suppress(OSError, ValueError):  # the root cgroup lacks these files
            used, stat = int((folder / used_name).read_text()), numa.read(folder / "memory.stat")
            cache = re.search(rf"^{cache_name} (\d+)$", stat, re.MULTILINE)
            used -= int(cache[1]) if cache else 0
            found = [numa.read(folder / name) for name in limits]  # "max": none
            left += [int(limit) - used for limit in found if limit.isdigit()]
    return max(min(left), 0)


def _memory_groups() -> Iterator[tuple[str, Path]]:
    """Version and directory of this process's memory cgroup, and of its visible ancestors."""
    groups = {}
    for line in numa.read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # v2 has no controllers there
        if not controllers or "memory" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = path
    for line in numa.read(_PROC / "self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind not in groups or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # The mount may start at a cgroup below the root, as in a container; paths may be the host's.
        root, folder = mount.split(" ")[3:5]
        below = os.path.relpath(groups[kind], root)
        parts = [] if below.startswith("..") else Path(below).parts
        for count in range(len(parts) + 1):
            yield kind, Path(folder, *parts[:count])


def pool_folder(node: int | None = None) -> Path:
    return (_SYS_MM if node is None else numa.folder(node)) / "hugepages/hugepages-2048kB"


def pool_pages(node: int | None = None) -> tuple[int, int]:
    """Pages in the hugetlb pool: (free and unreserved, all). Of a node's some may be reserved."""
    files = (pool_folder(node) / f"{name}_hugepages" for name in ("free", "resv", "nr"))
    free, reserved, total = (int(numa.read(file) or 0) for file in files)
    return free - reserved, total


def free_pool_bytes() -> int:
    return pool_pages()[0] * HUGE_PAGE_BYTES


def pool_lacks(spec: ArenaSpec, nodes: Sequence[int] = (), arenas: int = 1) -> str:
    """What the hugetlb pool lacks for ``arenas`` such arenas, on each of these nodes too; "" if it has all pages.
    Raises ArenaError if it has half of them: a pool that large was reserved for the arena."""
    node, needed, free = _shortest_pool(spec, nodes, arenas)
    if free >= needed:
        return ""
    where = "" if node is None else f" on NUMA node {node}"
    short = f"host pages need {needed} huge pages of 2 MiB{where}, and {free} are free in the pool"
    if 2 * free < needed:
        return short
    wanted = pool_pages(node)[1] + needed - free
    fix = f"sysctl vm.nr_hugepages={wanted}"
    if node is not None:
        fix = f"echo {wanted} > {pool_folder(node)}/nr_hugepages"
    host_gb = spec.flag_of(max_pages_in_pool(spec, nodes, arenas), arenas)
    raise ArenaError(f"{short}; run {fix}, or set --kv-offload-host-gb {host_gb}")


def max_pages_in_pool(spec: ArenaSpec, nodes: Sequence[int] = (), arenas: int = 1) -> int:
    """The most host pages, fewer than in ``spec``, with which such arenas fit into the pool; 0 if none do."""
    return spec.most_pages(lambda one: le(*_shortest_pool(one, nodes, arenas)[1:]))


def _shortest_pool(
    spec: ArenaSpec, nodes: Sequence[int], arenas: int
) -> tuple[int | None, int, int]:
    """Where the pool has the least of what is needed: (node, or None for the machine; pages needed; pages free)."""
    found = [
        (node, arenas * -(-nbytes // HUGE_PAGE_BYTES), pool_pages(node)[0])
        for node, nbytes in spec.bytes_by_node(nodes, HUGE_PAGE_BYTES).items()
    ]
    return min(found, key=lambda of_node: of_node[2] / of_node[1])


def take(address: int, spec: ArenaSpec, nodes: Sequence[int]) -> None:
    """Makes sure that a new arena outside of the pool will get its memory, on first write. A node must have its share,
    as what is bound to it cannot be elsewhere; what a machine gets only as it is used is allocated at once. Raises
    ArenaError."""
    needed = spec.bytes_by_node(nodes, mmap.PAGESIZE)
    free = {node: available_bytes(node) for node in needed}

    def short(spec: ArenaSpec) -> list[tuple[int | None, int]]:
        by_node = spec.bytes_by_node(nodes, mmap.PAGESIZE)
        return [(node, n - free[node]) for node, n in by_node.items() if n > free[node]]

    for node, lacks in short(spec):
        fitting = spec.flag_of(spec.most_pages(lambda smaller: not short(smaller)))
        fix = f"lower --kv-offload-host-gb to {fitting} for each rank"
        where = "" if node is None else f" of NUMA node {node}"
        fix += ", or give no CPUs of that node in --kv-offload-cpus" * bool(where)
        raise ArenaError(
            f"host memory{where} is short by {gib(lacks)}; {fix}\n  Needed: {gib(needed[node])}, available: "
            f"{gib(free[node])}; {LAST_RESORT}"
        )
    nbytes = needed.pop(None)

    def now() -> int:
        return min([bytes_now(), *(len(needed) * bytes_now(node) for node in needed)])

    if not promised_bytes() and nbytes > now():
        take_in_steps(address, nbytes, now)


def shmem_mode() -> str:
    """The selected mode in shmem_enabled; "" if the kernel has no transparent huge pages."""
    match = re.search(r"\[(\w+)\]", numa.read(_SYS_MM / "transparent_hugepage/shmem_enabled"))
    return match[1] if match else ""


def protect(address: int, nbytes: int) -> None:
    """Makes this range of a mapping read-only: a write raises SIGSEGV. Raises OSError."""
    if _libc.mprotect(address, nbytes, mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def populate(address: int, nbytes: int, *, write: bool = True) -> int:
    """Allocates and maps a range. Returns 0 or an errno: EINVAL before Linux 5.14, EFAULT where an access would raise
    SIGBUS."""
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    return ctypes.get_errno() if _libc.madvise(address, nbytes, advice) else 0


def populate_together(address: int, nbytes: int) -> int:
    """:func:`populate` by a thread for each CPU of the affinity, up to MAX_THREADS. Returns 0 or the first error."""

    def work(done: int) -> int:
        return populate(address + done, min(PIECE_BYTES, nbytes - done))

    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with ThreadPoolExecutor(threads, "scout-populate") as executor:
        # The first error cancels what has not begun.
        return next(filter(None, executor.map(work, range(0, nbytes, PIECE_BYTES))), 0)


def take_in_steps(address: int, nbytes: int, now: Callable[[], int]) -> None:
    """Allocates memory that the machine gets only as it is used, each step once ``now()`` says that there is room. Near
    the end of that steps become smaller: some machines grow only when little is left. Raises ArenaError with how far it
    got if the machine does not grow in time."""
    done, asked_s = 0, time.monotonic()
    fix = f"lower --kv-offload-host-gb, or free memory; {LAST_RESORT}"
    while done < nbytes:
        step, room = min(STEP_BYTES, nbytes - done), now() - KEPT_BYTES
        if room < step and (step := room // 2 // PIECE_BYTES * PIECE_BYTES) <= 0:
            if time.monotonic() - asked_s > GROWTH_WAIT_S:
                raise ArenaError(
                    f"this machine's memory does not grow: {gib(done)} of {gib(nbytes)} are allocated, and no more "
                    f"became available within {GROWTH_WAIT_S:g} s; {fix}"
                )
            time.sleep(0.1)
            continue
        error = populate_together(address + done, step)
        if error == errno.EINVAL:  # before Linux 5.14
            return
        if error:
            raise ArenaError(
                f"only {gib(done)} of {gib(nbytes)} of host memory could be allocated: {os.strerror(error)}; {fix}"
            )
        done, asked_s = done + step, time.monotonic()
        if done // STEP_BYTES > (done - step) // STEP_BYTES:
            logger.info("host memory: %s of %s are allocated", gib(done), gib(nbytes))


def bind_memory(address: int, spans: Sequence[tuple[int, int, int]]) -> None:
    """Binds spans (offset, bytes, node) of a mapping, not yet touched, to the nodes to allocate their pages from. The
    policy belongs to the file, so it also applies to other processes' faults. Only logs if the kernel or a sandbox
    refuses."""
    for offset, nbytes, node in spans:
        if error := _mbind(address + offset, nbytes, node):
            what = "host pages are not bound to NUMA node %d (mbind: %s), so CPU attention may be slower; allow it "
            logger.warning(what + "(docker run --cap-add SYS_NICE)", node, os.strerror(error))
            return
    logger.info("host pages are bound to NUMA nodes %s", sorted({node for *_, node in spans}))


def _mbind(address: int, nbytes: int, node: int) -> int:
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << (node % _BITS)
    words = _MBIND, address, nbytes, _MPOL_BIND, ctypes.addressof(mask), len(mask) * _BITS + 1, 0
    return ctypes.get_errno() if _libc.syscall(*map(ctypes.c_long, words)) else 0


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB"


def flag_gib(nbytes: int) -> str:
    """The value of --kv-offload-host-gb that is no more than a size."""
    return f"{nbytes * 1000 // 2**30 / 1000:.10g}"
