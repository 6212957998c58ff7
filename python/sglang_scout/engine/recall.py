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
import torch

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, PageIds
from sglang_scout.engine.device import SideStream, StreamCopy
from sglang_scout.engine.stores import Parts
from sglang_scout.ops.pages import copy_layer_pages
from sglang_scout.ops.residency import Reservation

Layers = Ids | int


@dataclass(frozen=True)
class Copies:
    """In-flight copies."""

    taken: Reservation
    done: Future[None] | StreamCopy
    why: str  # "recall": after a miss; "arrival", "fill": prefetch


class Recall:
    """Copies pages into resident slots and updates the table.

    ``layer`` may be an array that broadcasts with ``pages``, as in :class:`ResidencyTable`: each call is one launch.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._table, self._counters = parts, parts.table, parts.counters
        self._source = parts.host.for_copies(parts.device)
        # A thread copies without the GIL.
        self._side: Any = ThreadPoolExecutor(1, thread_name_prefix="scout-recall")
        if parts.device.type == "cuda":
            self._side = SideStream(parts.device)
        self._in_flight: deque[Copies] = deque()
        self._landed: deque[tuple[int, Reservation]] = deque()  # and since which step

    def compile_kernels(self) -> None:
        """Warm-up: copy the padding page to a free slot, which will be overwritten when taken."""
        ids, cache = np.zeros((3, 1), np.int64), self._parts.resident
        copy_layer_pages(self._source, torch.from_numpy(ids), cache.k, cache.v)

    @property
    def late_pages(self) -> int:
        """Right after :meth:`commit`: pages whose copies are late."""
        return sum(len(copies.taken.pages) for copies in self._in_flight)

    def start_recall(self, layer: Layers, pages: PageIds, step: int) -> Ids:
        """Start copying ``pages`` to free slots and to those of less frequent pages that ``step`` did not select.
        Returns ``[L]`` how many."""
        taken = self._table.exchange(layer, pages, step)
        self._submit(taken, "recall")
        return taken.per_layer(self._table.num_layers)

    def prefetch(self, layer: Layers, pages: PageIds, why: str) -> None:
        """Start copying ``pages`` into free slots; for an "arrival" into those that are not held back."""
        self._submit(self._table.reserve(layer, pages, is_forced=why != "arrival"), why)

    def _submit(self, taken: Reservation, why: str) -> None:
        if len(taken.pages):
            self._in_flight.append(Copies(taken, self._side.submit(self._copy, taken, why), why))

    def commit(self, step: int, patience_us: float | None = None) -> None:
        """Step boundary: map what was copied during the last step.

        Args:
            patience_us: how long to wait for late copies, whose pages then stay with the CPU for another step: correct,
                but not deterministic across runs. None: until all have finished.
        """
        start_ns = time.monotonic_ns()
        deadline_ns = None if patience_us is None else start_ns + int(patience_us * 1000)
        # One thread runs them in this order: after a late one, all are late.
        while self._in_flight and self._ended(self._in_flight[0], deadline_ns):
            self._land(self._in_flight.popleft(), step)
        waited_ns = time.monotonic_ns() - start_ns
        if isinstance(self._side, SideStream):
            waited_ns = self._side.take_waited_ns()
        self._counters.recall_wait_us += waited_ns // 1000

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
        self._counters.recall_bytes += 2 * self._parts.shape.page_bytes * len(taken.pages)
        if copies.why == "recall":
            self._landed.append((step, taken))

    def judge_landed(self, step: int) -> tuple[Ids, Ids]:
        """Step boundary, before :meth:`commit`: ``[L]`` pages recalled ``RESULT_DELAY_STEPS`` boundaries before, and
        those of them that the step after selected."""
        landed, used = np.zeros((2, self._table.num_layers), np.int64)
        while self._landed and self._landed[0][0] <= step - RESULT_DELAY_STEPS:
            first, taken = self._landed.popleft()
            landed += taken.per_layer(len(landed))
            at = taken.layers, taken.pages
            stamp = self._table.uses.stamp_of(first)
            was_used = (self._table.slot_of[at] >= 0) & (self._table.uses.stamp[at] == stamp)
            used += np.bincount(taken.layers[was_used], minlength=len(used))
        return landed, used

    def load_now(self, layer: Layers, pages: PageIds, step: int, is_forced: bool = True) -> None:
        """Copy those of ``pages`` that find a slot, before the step begins, and map them."""
        taken = self._table.reserve(layer, pages, is_forced)
        if len(taken.pages):
            self._copy(taken, "load")
            self._table.commit(taken, step)
        self._counters.warmed_pages += len(taken.pages)

    def _copy(self, taken: Reservation, why: str) -> None:
        pages, layers, cache = len(taken.pages), taken.layers, self._parts.resident
        about = {"pages": pages, "bytes": 2 * self._parts.shape.page_bytes * pages}
        about["layers"] = int(np.count_nonzero(taken.per_layer(self._table.num_layers)))
        if about["layers"] == 1:
            about["layer"] = int(layers[0])
        ids = np.stack([layers, taken.pages, taken.slots])
        # Before the copy is mapped, so before a step whose tokens may be returned attends to it.
        if self._parts.host.checksums is not None:
            self._parts.host.checksums.check(layers, taken.pages)
        with self._parts.tracer.slice("copies", why, **about):
            copy_layer_pages(self._source, torch.from_numpy(ids), cache.k, cache.v)

    def close(self) -> None:
        self._side.shutdown(wait=True)
