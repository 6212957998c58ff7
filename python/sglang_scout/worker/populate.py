"""Mapping an arena's pages into the worker before they are needed.

The first access to each 4 KiB of a mapping is a fault. For a host page of some layer these are some
32, which can cost more than the attention to the page. On a CUDA device the decode server locks the
host pages at start, so that their memory is taken anyway, and the worker then goes through the arena
once behind its work.
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

# The process's other threads may have to wait for a piece: they hold the lock of the mappings.
PIECE_BYTES = 256 * 1024


class PopulateThread:
    """A thread that maps all of an arena behind its ring, at the lowest priority of its class.

    Args:
        cpus: where it runs; empty: where the process does. Beside threads that poll, hardly ever.
    """

    def __init__(self, arena: Arena, cpus: Collection[int] = ()) -> None:
        self._cpus = cpus
        self._begin = arena.address + arena.layout().kv_offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._nbytes = arena.address + arena.nbytes - self._begin
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scout-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the arena may be unmapped afterwards. Idempotent."""
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
                    "worker: %.1f of %.1f GiB of the arena are mapped, the others will be when they are "
                    "first needed: madvise: %s",
                    done / 2**30,
                    self._nbytes / 2**30,
                    os.strerror(error),
                )
                return
        logger.info(
            "worker: the arena's %.1f GiB are mapped, after %.1f s",
            self._nbytes / 2**30,
            time.monotonic() - begin_s,
        )
