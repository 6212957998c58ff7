"""Page copies from host to device: synchronous before a step, or asynchronous during one (paper section 3.4).

A recall starts at a step boundary and is committed at the next one: a page left to the CPU in step t stays non-resident
in step t. Its slots' old pages are evicted at the boundary, so that the step does not read them; steps still running
may, and on a device copies wait for those.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.device import SideStream, StreamCopy
from sglang_scout.engine.policy import RESULT_DELAY_STEPS
from sglang_scout.engine.stores import Parts
from sglang_scout.ops.pages import copy_layer_pages
from sglang_scout.ops.residency import Reservation

Layers = npt.NDArray[np.int64] | int
PageIds = npt.NDArray[np.integer]

_SMOOTH = 1 / 8


@dataclass(frozen=True)
class Copies:
    """In-flight copies."""

    taken: Reservation
    done: Future[int] | StreamCopy
    why: str  # "recall": after a miss; "arrival", "fill": prefetch


class Recall:
    """Copies pages into resident slots and updates the table.

    ``layer`` may be an array that broadcasts with ``pages``, as in :class:`ResidencyTable`: each call is one launch.

    Attributes:
        started: ``[L]`` int64, pages whose recall has started since the caller last set it to 0.
        landed, used: ``[L]`` int64, pages recalled ``RESULT_DELAY_STEPS`` boundaries before the last :meth:`commit`,
            and those of them that the following step selected.
        link_pages_per_us: speed of finished copies, smoothed; 0 before the first.
    """

    def __init__(self, parts: Parts) -> None:
        self._resident, self._table = parts.resident, parts.table
        self._source = parts.host.for_copies(parts.device)
        self._checksums, self._counters = parts.host.checksums, parts.counters
        self._page_bytes, self._tracer = parts.shape.page_bytes, parts.tracer
        # A thread copies without the GIL.
        self._side: Any = ThreadPoolExecutor(1, thread_name_prefix="scout-recall")
        if parts.device.type == "cuda":
            self._side = SideStream(parts.device)
        self._in_flight: deque[Copies] = deque()
        self._untimed: deque[tuple[int, Future[int] | StreamCopy]] = deque()
        self._landed: deque[tuple[int, Reservation]] = deque()  # and since which step
        self._judged_step = -1
        layers = parts.table.num_layers
        self.started, self.landed, self.used = np.zeros((3, layers), np.int64)
        self.link_pages_per_us = 0.0

    def compile_kernels(self) -> None:
        """Warm-up: copy the padding page to a free slot, which will be overwritten when taken."""
        ids, cache = np.zeros((3, 1), np.int64), self._resident
        copy_layer_pages(self._source, torch.from_numpy(ids), cache.k, cache.v)

    @property
    def late_pages(self) -> int:
        """Right after :meth:`commit`: pages whose copies are late."""
        return sum(len(copies.taken.pages) for copies in self._in_flight)

    def start_recall(self, layer: Layers, pages: PageIds, step: int) -> None:
        """Start copying ``pages`` to free slots and to those of less frequent pages that ``step`` did not select."""
        self._submit(self._table.exchange(layer, pages, step), "recall")

    def fill(self, layer: Layers, pages: PageIds) -> None:
        """Start prefetching ``pages`` into free slots."""
        self._submit(self._table.reserve(layer, pages), "fill")

    def prefetch_arrival(self, layer: Layers, pages: PageIds) -> None:
        """Start prefetching the first ``pages`` of a request that has not joined yet into free slots."""
        self._submit(self._table.reserve(layer, pages, is_forced=False), "arrival")

    def _submit(self, taken: Reservation, why: str) -> None:
        if len(taken.pages):
            copies = Copies(taken, self._side.submit(self._copy, taken, why), why)
            self._in_flight.append(copies)
            self.started += (why == "recall") * taken.per_layer(len(self.started))

    def commit(self, step: int, patience_us: float | None = None) -> None:
        """Step boundary: map what was copied during the last step.

        Args:
            patience_us: how long to wait for late copies, whose pages then stay with the CPU for another step: correct,
                but not deterministic across runs. None: until all have finished.
        """
        if step != self._judged_step:
            self._judge_landed(step)
        if not self._in_flight:
            self._take_times()
            return
        start_ns = time.monotonic_ns()
        deadline_ns = None if patience_us is None else start_ns + int(patience_us * 1000)
        # One thread runs them in this order: after a late one, all are late.
        while self._in_flight and self._ended(self._in_flight[0], deadline_ns):
            self._land(self._in_flight.popleft(), step)
        if not isinstance(self._side, SideStream):
            self._counters.recall_wait_us += (time.monotonic_ns() - start_ns) // 1000
        self._take_times()

    def _take_times(self) -> None:
        """Collect times of awaited copies: on a device the host learns them boundaries later."""
        while self._untimed:
            pages, done = self._untimed[0]
            took_ns, waited_ns = done.result(), 0
            if isinstance(done, StreamCopy):
                waited_ns = done.waited_ns()
            if took_ns is None or waited_ns is None:
                return
            self._untimed.popleft()
            self._counters.recall_wait_us += waited_ns // 1000
            speed = pages / max(took_ns / 1e3, 1e-3)
            weight = _SMOOTH if self.link_pages_per_us else 1.0
            self.link_pages_per_us += (speed - self.link_pages_per_us) * weight

    def _ended(self, copies: Copies, deadline_ns: int | None) -> bool:
        left_s = None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns()) / 1e9
        with contextlib.suppress(TimeoutError):
            if (error := copies.done.exception(left_s)) is not None:
                raise error
        return copies.done.done()

    def _land(self, copies: Copies, step: int) -> None:
        taken = copies.taken
        # They were selected in the previous step, or by a prompt's last token. Stamped with this step they could not be
        # evicted in it, and might leave a request without a slot for its newest page.
        wanted = self._table.commit(taken, -1 if copies.why == "fill" else step - 1)
        if copies.why == "arrival":
            self._counters.warmed_pages += wanted
        else:
            self._counters.recalled_pages += wanted
        self._counters.recall_bytes += 2 * self._page_bytes * len(taken.pages)
        self._untimed.append((len(taken.pages), copies.done))
        if copies.why == "recall":
            self._landed.append((step, taken))

    def _judge_landed(self, step: int) -> None:
        """Count the landed pages that the first step after selected."""
        self._judged_step = step
        self.landed[:] = 0
        self.used[:] = 0
        while self._landed and self._landed[0][0] <= step - RESULT_DELAY_STEPS:
            first, taken = self._landed.popleft()
            self.landed += taken.per_layer(len(self.landed))
            at = taken.layers, taken.pages
            stamp = self._table.uses.stamp_of(first)
            was_used = (self._table.slot_of[at] >= 0) & (self._table.uses.stamp[at] == stamp)
            self.used += np.bincount(taken.layers[was_used], minlength=len(self.used))

    def load_now(self, layer: Layers, pages: PageIds, step: int, is_forced: bool = True) -> None:
        """Copy those of ``pages`` that find a slot, before the step begins, and map them."""
        taken = self._table.reserve(layer, pages, is_forced)
        if len(taken.pages):
            self._copy(taken, "load")
            self._table.commit(taken, step)
        self._counters.warmed_pages += len(taken.pages)

    def map_without_copy(self, layer: Layers, pages: PageIds, step: int) -> int:
        """Map still empty pages to free slots, without copying. Returns how many found one."""
        return self._table.commit(self._table.reserve(layer, pages), step)

    def _copy(self, taken: Reservation, why: str) -> int:
        start_ns = time.monotonic_ns()
        pages, layers = len(taken.pages), taken.layers
        about = {"pages": pages, "bytes": 2 * self._page_bytes * pages}
        about["layers"] = int(np.count_nonzero(taken.per_layer(len(self.started))))
        if about["layers"] == 1:
            about["layer"] = int(layers[0])
        ids = np.stack([layers, taken.pages, taken.slots])
        cache = self._resident
        # Before the copy is mapped, so before a step whose tokens may be returned attends to it.
        if self._checksums is not None:
            self._checksums.check(layers, taken.pages)
        with self._tracer.slice("copies", why, **about):
            copy_layer_pages(self._source, torch.from_numpy(ids), cache.k, cache.v)
        return time.monotonic_ns() - start_ns

    def close(self) -> None:
        self._side.shutdown(wait=True)
