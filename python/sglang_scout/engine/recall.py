"""Page copies from host to device: at once before a step, or asynchronously behind one (paper section 3.4).

A recall starts after a layer's attention and is committed at the next step boundary: a page that was
handed to the CPU in step t is still not resident in step t, and is in step t+1.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.pages import Reservation, ResidencyTable
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.pools import HostPages, ResidentCache
from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.gather import copy_pages


@dataclass(frozen=True)
class Copies:
    """Copies under way."""

    taken: Reservation
    done: Future[None]

    def slots_of(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The slot that each of ``pages`` is being copied to, -1 for any other page."""
        known = self.taken.pages  # ascending
        if not len(known):
            return np.full(pages.shape, -1, np.int32)
        at = np.minimum(np.searchsorted(known, pages), len(known) - 1)
        return np.where(known[at] == pages, self.taken.slots[at], -1).astype(np.int32)


class Recall:
    """Copies pages into resident slots and keeps the table true.

    On the CPU device the side stream is a thread: the copies run without the interpreter lock.
    """

    def __init__(
        self,
        host: HostPages,
        resident: ResidentCache,
        table: ResidencyTable,
        counters: Counters,
        page_bytes: int,
        tracer: Tracer,
    ) -> None:
        self._host = host
        self._resident = resident
        self._table = table
        self._counters = counters
        self._page_bytes = page_bytes
        self._tracer = tracer
        self._side = ThreadPoolExecutor(1, thread_name_prefix="scout-recall")
        self._in_flight: list[Copies] = []

    def start(self, layer: int, pages: npt.NDArray[np.integer]) -> Copies:
        """Begin to copy ``pages`` of ``layer`` as far as free slots go; they are committed later."""
        taken = self._table.reserve(layer, pages)
        copies = Copies(taken, self._side.submit(self._copy, taken))
        self._in_flight.append(copies)
        return copies

    def commit(self, step: int) -> None:
        """Step boundary: map what was copied behind the last step.

        Waits for copies that are still under way. They had a whole step's time, so this is rare, and
        it makes a request's residency, hence its tokens, independent of the copy thread's luck.
        """
        start_ns = time.monotonic_ns()
        for copies in self._in_flight:
            copies.done.result()
            # They were selected in the step before. Stamped with this one they could not be evicted
            # in it, and might leave a request without a slot for its newest page.
            wanted = self._table.commit(copies.taken, step - 1)
            self._counters.recalled_pages += wanted
            self._counters.recall_bytes += 2 * self._page_bytes * len(copies.taken.pages)
        if self._in_flight:
            self._counters.recall_wait_us += (time.monotonic_ns() - start_ns) // 1000
        self._in_flight.clear()

    def load_now(self, layer: int, pages: npt.NDArray[np.integer], step: int) -> int:
        """Copy ``pages`` before the step begins and map them. Returns how many found a slot."""
        taken = self._table.reserve(layer, pages)
        if len(taken.pages):
            self._copy(taken)
            self._table.commit(taken, step)
        return len(taken.pages)

    def _copy(self, taken: Reservation) -> None:
        layer = taken.layer
        source, target = torch.from_numpy(taken.pages), torch.from_numpy(taken.slots)
        with self._tracer.slice("copies", "recall", layer=layer, pages=len(taken.pages)):
            copy_pages(self._host.k[layer], source, self._resident.k[layer], target)
            copy_pages(self._host.v[layer], source, self._resident.v[layer], target)

    def close(self) -> None:
        self._side.shutdown(wait=True)
