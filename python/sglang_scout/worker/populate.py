"""Pre-faulting an arena's pages into the CPU attention process before they are needed.

The first access to each 4 KiB of a mapping faults. A host page of one layer takes some 32 faults,
which can cost more than attending to it. With a CUDA device the decode server pins the host pages
at start, so their memory is allocated anyway, and the worker then walks the arena once in the
background.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Collection

from sglang_scout.worker.arena import Arena
from sglang_scout.worker.host_memory import populate

logger = logging.getLogger("sglang_scout.worker")

# Small, because other threads of the process may block on the mmap lock while a piece is populated.
PIECE_BYTES = 256 * 1024


class PopulateThread:
    """A thread that maps all of an arena after its ring, at the lowest priority of its class.

    Args:
        cpus: its affinity; empty: that of the process. It gets hardly any time on CPUs shared with polling threads.
    """

    def __init__(self, arena: Arena, cpus: Collection[int] = ()) -> None:
        self._cpus = cpus
        self._begin = arena.address + arena.layout().kv_offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._nbytes = arena.address + arena.nbytes - self._begin
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scout-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread; the arena may be unmapped afterwards. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, 19)
        if self._cpus:
            os.sched_setaffinity(thread, self._cpus)
        begin_s = time.monotonic()
        for done in range(0, self._nbytes, PIECE_BYTES):
            if self._stopping.is_set():
                return
            size = min(PIECE_BYTES, self._nbytes - done)
            if error := populate(self._begin + done, size, write=False):
                logger.warning(
                    "mapped %.1f of %.1f GiB of the arena; the rest will be mapped at first use: madvise: %s",
                    done / 2**30,
                    self._nbytes / 2**30,
                    os.strerror(error),
                )
                return
        logger.info(
            "mapped the %.1f GiB of the arena in %.1f s",
            self._nbytes / 2**30,
            time.monotonic() - begin_s,
        )
