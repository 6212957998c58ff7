"""The buffers of a step: its inputs, fixed by its boundary, and what it selects and waits for, read back later.

A step writes its results to buffers of the device. The next boundary launches the readback, before the next step
overwrites them, and the boundary after that takes the values.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints
from sglang_scout.engine.device import Fetching, Staging, upload
from sglang_scout.engine.stores import Sizes
from sglang_scout.engine.trace import Cut, DeviceClock
from sglang_scout.ops.residency import ResidencyTable

if TYPE_CHECKING:
    from sglang_scout.engine.requests import Batch

Words = TypeVar("Words", Tensor, Ints)


def of_lists(x: Tensor, lists: int) -> Tensor:
    """``[B, heads, ...]`` as ``[B * C, heads / C, ...]``: grouped by selection list."""
    return x.contiguous().view(len(x) * lists, -1, *x.shape[2:])


class Candidates(NamedTuple):
    """A step's candidates, all full pages, on the device: B requests with C lists each, N columns.

    Attributes, int32, -1 or less beyond a row's last page:
        table, n_full: ``[B, N]``, ``[B]``.
        n_scored: ``[B]`` as ``n_full``, but 0 where the budget covers them all: then no digest is read.
        lists: C; with one list the others are the same tensors.
        list_table, list_n_full, list_n_scored: ``[B * C, N]``, ``[B * C]``, ``[B * C]`` the same for each list.
        digest_rows: ``[B * C, N]`` rows of digests if each list has its own, page * C + list.
    """

    table: Tensor
    n_full: Tensor
    n_scored: Tensor
    lists: int
    list_table: Tensor
    list_n_full: Tensor
    list_n_scored: Tensor
    digest_rows: Tensor

    @classmethod
    def of(
        cls, table: Tensor, n_full: Tensor, lists: int, n_scored: Tensor | None = None
    ) -> Candidates:
        """From these (without ``n_scored`` all of ``n_full`` are scored), in fixed buffers; :meth:`fill` before use."""
        n_scored = n_full if n_scored is None else n_scored
        own = table, n_full, n_scored, table
        if lists > 1:
            own = tuple(x.new_zeros(len(x) * lists, *x.shape[1:]) for x in own)
        return cls(table, n_full, n_scored, lists, *own)

    def fill(self, rows: int) -> None:
        """Update the derived tensors of the first ``rows`` requests."""
        if self.lists == 1:
            return
        head = torch.arange(self.lists, dtype=torch.int32, device=self.table.device)[:, None]
        table, n_full, n_scored = (x[:rows, None] for x in self[:3])
        sources = table, n_full, n_scored, table * self.lists + head
        for x, source in zip(self[4:], sources, strict=True):
            x[: rows * self.lists].unflatten(0, (rows, self.lists)).copy_(source)

    def first(self, rows: int) -> Candidates:
        """The first ``rows`` requests."""
        of_rows, lists, of_lists = self[:3], self.lists, self[4:]
        each = rows * lists
        return Candidates(*(x[:rows] for x in of_rows), lists, *(x[:each] for x in of_lists))


class StepInputs:
    """A batch in fixed buffers on the device, B = ``max_batch`` rows, N = ``max_pages`` columns.

    Padding rows attend to nothing and write nothing.

    Attributes, int32 on the device:
        tail_len, tail_page: ``[B]``; see :class:`Batch`.
        tail_slot: ``[L, B]``.
        candidates: the full pages of each row.
        slot_of: ``[L, P]`` of the residency table.
    """

    def __init__(self, residency: ResidencyTable, sizes: Sizes, device: torch.device) -> None:
        self._residency, self._sizes, self._device = residency, sizes, device
        residency.take_changes()
        self.slot_of = upload(residency.slot_of, device).clone()
        layers, rows = residency.num_layers, sizes.max_batch
        self._head, self._max_changes = (4 + layers) * rows, max(1024, 4 * layers * rows)
        # 8-byte values start at even words. The table is last: only its rows in use are sent.
        self._changes = self._head + self._head % 2
        self._table = self._changes + 3 * self._max_changes
        self._staging = Staging(self._table + rows * sizes.max_pages, device)
        self._rows = 0  # in use in the device's table
        head, table = self._split(self._staging.device)
        n_full, n_scored, self.tail_len, self.tail_page = head[:4]
        self.tail_slot = head[4:]
        self.candidates = Candidates.of(table, n_full, sizes.lists, n_scored)
        self.clear()

    def _split(self, words: Words) -> tuple[Words, Words]:
        """``[4 + L, B]`` values of each row, and the ``[B, N]`` table."""
        rows = self._sizes.max_batch
        return words[: self._head].reshape(-1, rows), words[self._table :].reshape(rows, -1)

    def clear(self) -> None:
        """No row has a request until the next step is sent."""
        words, rows = self._staging.device, self._sizes.max_batch
        words.fill_(-1)
        words[: 3 * rows] = 0
        self.candidates.fill(rows)

    def send(self, batch: Batch) -> None:
        """Fill and send, with what has changed in the residency table, ordered on the current stream."""
        changed, slots = self._residency.take_changes()
        count, used = batch.table.shape
        words = self._staging.fill()
        head, table = self._split(words)
        head[:] = -1
        head[:3] = 0
        n_scored = np.where(batch.n_full > self._sizes.budget_pages, batch.n_full, 0)
        head[:4, :count] = batch.n_full, n_scored, batch.tail_len, batch.tail_page
        head[4:, :count] = batch.tail_slot
        sent = max(count, self._rows)
        table[:count, :used] = batch.table
        table[np.arange(count), batch.n_full] = -1  # the page that is being filled
        table[:count, used:] = -1
        table[count:sent] = -1
        self._rows = count
        n = len(changed)
        if n > self._max_changes:
            there = upload(changed, self._device), upload(slots, self._device)
        else:
            middle = self._changes + 2 * n
            words[self._changes : middle] = changed.view(np.int32)
            words[middle : middle + n] = slots
            block = self._staging.device
            there = block[self._changes : middle].view(torch.int64), block[middle : middle + n]
        self._staging.send(self._table + sent * self._sizes.max_pages)
        self.candidates.fill(sent)
        if n:
            self.slot_of.view(-1).index_copy_(0, *there)


@dataclass
class LaunchedStep:
    """A step, L layers, the B rows of its batch; its results once the host knows them."""

    step: int
    start_ns: int  # of its boundary
    batch: Batch
    begun_ns: int  # end of its boundary
    end_ns: int = 0  # 0: not known yet
    results: Fetching | None = None
    cuts: list[Cut] = field(default_factory=list)  # of its timeline
    pages: Ints = field(init=False)  # [L, B, C * k] selected by lists, -1 padded
    missing: Ints = field(init=False)  # [L, B, C * k] of them, not resident
    waited_ns: Ids = field(init=False)  # [L] for CPU attention, since the last step
    cosine: npt.NDArray[np.float32] = field(init=False)  # [L] of predicted and real queries, or NaN


class StepResults:
    """Device buffers that steps write to, and the launched steps.

    Args:
        waited_ns: ``[L]`` int64, time waited since the ring was created; read only.
        clock: stamps of a timeline, if recorded.

    Attributes:
        pages, missing: ``[L, max_batch * C, k]`` int32 on the device.
        cosine: ``[L]`` float32 on the device.
        launched: steps without results; the last one runs.
    """

    def __init__(
        self, sizes: Sizes, waited_ns: Tensor, device: torch.device, clock: DeviceClock | None
    ) -> None:
        self._clock, self._lists, layers = clock, sizes.lists, len(waited_ns)
        both = 2, layers, sizes.max_batch * sizes.lists, sizes.budget_pages
        self._both = torch.full(both, -1, dtype=torch.int32, device=device)
        self.pages, self.missing = self._both
        self.cosine = torch.full((layers,), torch.nan, device=device)
        self._sent = [self._both, waited_ns, self.cosine]
        if clock is not None:
            self._sent.append(clock.stamps)
        self._on_host = [
            [t.cpu().pin_memory() for t in self._sent] if device.type == "cuda" else None
            for _ in range(2)
        ]
        self.launched: deque[LaunchedStep] = deque()
        self._waited_before = waited_ns.cpu().numpy().copy()  # of another engine

    def launch(self, step: int, start_ns: int, batch: Batch) -> None:
        """A step is about to be launched."""
        self.launched.append(LaunchedStep(step, start_ns, batch, time.monotonic_ns()))

    def ended(self, end_ns: int) -> None:
        """The tokens of the oldest unfinished step are on the host."""
        for launched in self.launched:
            if not launched.end_ns:
                launched.end_ns = end_ns
                return

    def of(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Buffers for the selected and the missing pages of a layer, each [rows, k]."""
        return self.pages[layer, :rows], self.missing[layer, :rows]

    def compare(self, layer: int, query: Tensor, query_ahead: Tensor, live: Tensor) -> None:
        """Record the cosine of a layer's predicted query, for ``live`` ``[B]`` rows: a captured batch may be padded."""
        cosine = torch.cosine_similarity(query.float(), query_ahead.float(), dim=-1).mean(1)
        self.cosine[layer] = cosine.where(live, 0.0).sum() / live.sum()

    def send_for(self) -> None:
        """Boundary: launch the readback of the last launched step."""
        if self.launched:
            last = self.launched[-1]
            last.results = Fetching(self._sent, self._on_host[last.step & 1])
            if self._clock is not None and not last.batch.is_dense:
                last.cuts = self._clock.cuts

    def take(self) -> LaunchedStep | None:
        """The results of the step launched ``RESULT_DELAY_STEPS`` boundaries ago, if there was one; valid until the
        next :meth:`send_for`."""
        if len(self.launched) < RESULT_DELAY_STEPS:
            return None
        done = self.launched.popleft()
        done.end_ns = done.end_ns or self.launched[0].start_ns
        assert done.results is not None
        (pages, missing), waited_ns, done.cosine, *stamps = done.results.wait()
        rows = len(done.batch.ages)
        used = [x[:, : rows * self._lists].reshape(len(x), rows, -1) for x in (pages, missing)]
        if done.batch.is_dense:  # it wrote nothing
            used = [np.zeros((len(pages), rows, 0), np.int32)] * 2
            done.cosine = np.full_like(done.cosine, np.nan)
        done.pages, done.missing = used
        done.waited_ns = waited_ns - self._waited_before
        self._waited_before = waited_ns.copy()
        if self._clock is not None:
            self._clock.write(done.step, done.cuts, stamps[0], done.waited_ns)
        return done
