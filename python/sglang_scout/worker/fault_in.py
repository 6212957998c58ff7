"""Taking the memory of a mapping before it is written: MADV_POPULATE_WRITE, from several threads.

Clearing pages is what takes the time, some GB a second on one thread. Where a first write would end
the process with SIGBUS, as in a pool of huge pages that has none left, this says so instead.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading

MOST_THREADS = 16  # more do not clear faster than the memory takes it
PIECE_BYTES = 32 * 2**20
_MADV_POPULATE_WRITE = 23  # of Linux 5.14, not in the mmap module

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # called without the interpreter lock
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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

    others = [threading.Thread(target=work, name=f"scout-fault-in-{i}") for i in range(1, threads)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    return errors[0] if errors else 0
