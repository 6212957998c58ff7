"""Host memory: how much there is, and taking it before it is written.

Clearing pages is what takes the time, some GB a second on one thread. Where a first write would end
the process with SIGBUS, as in a pool of huge pages that has none left, MADV_POPULATE_WRITE says so
instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import threading
from pathlib import Path

from sglang_scout.core.errors import ArenaError

HUGE_PAGE_BYTES = 2 * 2**20
MOST_THREADS = 16  # more do not clear faster than the memory takes it
PIECE_BYTES = 32 * 2**20
_MADV_POPULATE_WRITE = 23  # of Linux 5.14, not in the mmap module
_CGROUPS = (  # of version 2 and 1: folder; names of the limit, the use and the cache that gives way
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_inactive_file"),
)  # fmt: skip

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # called without the interpreter lock
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def available_bytes() -> int:
    """Memory that a new arena may take: the system's, or what the control group leaves."""
    meminfo = Path("/proc/meminfo").read_text()
    line = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if line is None:
        raise ArenaError("/proc/meminfo has no MemAvailable")
    available = int(line[1]) * 1024
    for folder, limit_name, used_name, cache_name in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such control group, or "max"
            limit = int(Path(folder, limit_name).read_text())
            used = int(Path(folder, used_name).read_text())
            stat = Path(folder, "memory.stat").read_text()
            cache = re.search(rf"^{cache_name} (\d+)$", stat, re.MULTILINE)
            used -= int(cache[1]) if cache else 0
            available = min(available, max(limit - used, 0))
    return available


def free_pool_bytes() -> int:
    """What the pool of huge pages has free and not reserved, on all nodes."""
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    try:
        free = int((pool / "free_hugepages").read_text())
        reserved = int((pool / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0
    return (free - reserved) * HUGE_PAGE_BYTES


def shared_huge_pages_allowed() -> bool:
    """Whether shared memory may get transparent huge pages."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return re.search(r"\[(always|within_size|advise|force)\]", text) is not None


def populate(address: int, nbytes: int) -> int:
    """Takes and maps all pages of a range. 0, or the error number of the system that refuses: EINVAL of
    one before Linux 5.14, EFAULT where a write would be a SIGBUS."""
    failed = _madvise(address, nbytes, _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


def populate_together(address: int, nbytes: int, threads: int = 0) -> int:
    """:func:`populate` for a large range, by several threads. The error of the first that is refused.

    Args:
        threads: 0: one for each CPU of this thread, up to ``MOST_THREADS``.
    """
    threads = threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
    pieces = itertools.count(0, PIECE_BYTES)  # its next() is one step for the interpreter
    errors: list[int] = []

    def work() -> None:
        while not errors and (done := next(pieces)) < nbytes:
            if error := populate(address + done, min(PIECE_BYTES, nbytes - done)):
                errors.append(error)

    others = [threading.Thread(target=work, name=f"scout-populate-{i}") for i in range(1, threads)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    return errors[0] if errors else 0


def gib(nbytes: int) -> str:
    """For messages."""
    return f"{nbytes / 2**30:.3f} GiB"
