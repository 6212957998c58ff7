"""Inputs of a step, fixed by its boundary, on the host and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_scout.engine.device import Staging, upload
from sglang_scout.engine.stores import Sizes
from sglang_scout.ops.residency import ResidencyTable

if TYPE_CHECKING:
    from sglang_scout.engine.requests import Batch


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
        rows, columns = table.shape
        if lists == 1:
            return cls(table, n_full, n_scored, 1, table, n_full, n_scored, table)
        sizes = (columns,), (), (), (columns,)
        made = [table.new_zeros(rows * lists, *size) for size in sizes]
        return cls(table, n_full, n_scored, lists, *made)

    def fill(self, rows: int) -> None:
        """Update the derived tensors of the first ``rows`` requests."""
        if self.lists == 1:
            return
        sizes = rows, self.lists, -1
        table = self.table[:rows, None]
        of = [x[: rows * self.lists].view(sizes) for x in (self.list_table, self.digest_rows)]
        of[0].copy_(table.expand_as(of[0]))
        head = torch.arange(self.lists, dtype=torch.int32, device=table.device)
        torch.add(table * self.lists, head[:, None], out=of[1])
        for each, one in ((self.list_n_full, self.n_full), (self.list_n_scored, self.n_scored)):
            of_row = each[: rows * self.lists].view(rows, self.lists)
            of_row.copy_(one[:rows, None].expand_as(of_row))

    def first(self, rows: int) -> Candidates:
        """The first ``rows`` requests."""
        of_rows, lists, of_lists = self[:3], self.lists, self[4:]
        each = rows * lists
        return Candidates(*(x[:rows] for x in of_rows), lists, *(x[:each] for x in of_lists))


class StepInputs:
    """The same in fixed buffers on the device, B = ``max_batch`` rows, N = ``max_pages`` columns.

    Padding rows attend to nothing and write nothing.

    Attributes, int32 on the device:
        tail_len, tail_page: ``[B]``; see :class:`Batch`.
        tail_slot: ``[L, B]``.
        candidates: the full pages of each row.
        slot_of: ``[L, P]`` of the residency table.
    """

    def __init__(self, table: ResidencyTable, sizes: Sizes, device: torch.device) -> None:
        layers = table.num_layers
        self._residency = table
        table.take_changes()
        self.slot_of = upload(table.slot_of, device).clone()
        max_batch, max_pages = sizes.max_batch, sizes.max_pages
        self._sizes, self._budget_pages = (layers, max_batch, max_pages), sizes.budget_pages
        self._head = (4 + layers) * max_batch
        self._device = device
        self._max_changes = max(1024, 4 * layers * max_batch)
        # 8-byte values start at even words. The table is last: only its rows in use are sent.
        self._changes = self._head + self._head % 2
        self._table = self._changes + 3 * self._max_changes
        self._staging = Staging(self._table + max_batch * max_pages, device)
        self._rows = 0  # in use in the device's table
        words = self._staging.device
        n_full, n_scored, self.tail_len, self.tail_page = (
            words[i * max_batch : (i + 1) * max_batch] for i in range(4)
        )
        self.tail_slot = words[4 * max_batch : self._head].view(layers, max_batch)
        table = words[self._table :].view(max_batch, max_pages)
        self.candidates = Candidates.of(table, n_full, sizes.lists, n_scored)
        self.clear()

    def clear(self) -> None:
        """No row has a request until the next step is sent."""
        words = self._staging.device
        words.fill_(-1)
        words[: 3 * self._sizes[1]] = 0
        self.candidates.fill(self._sizes[1])

    def send(self, batch: Batch) -> None:
        """Fill and send, with what has changed in the residency table, ordered on the current stream."""
        changed, slots = self._residency.take_changes()
        layers, rows, columns = self._sizes
        count, used = batch.table.shape
        words = self._staging.fill()
        head = words[: self._head].reshape(4 + layers, rows)
        head[:] = -1
        head[:3] = 0
        n_scored = np.where(batch.n_full > self._budget_pages, batch.n_full, 0)
        for i, values in enumerate((batch.n_full, n_scored, batch.tail_len, batch.tail_page)):
            head[i, :count] = values
        head[4:, :count] = batch.tail_slot
        table = words[self._table :].reshape(rows, columns)
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
        self._staging.send(self._table + sent * columns)
        self.candidates.fill(sent)
        if n:
            self.slot_of.view(-1).index_copy_(0, *there)
