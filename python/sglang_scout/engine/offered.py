"""The candidate pages of a step, per selection list."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def of_lists(x: torch.Tensor, lists: int) -> torch.Tensor:
    """``[B, heads, ...]`` as ``[B * C, heads / C, ...]``: grouped by selection list."""
    return x.contiguous().view(len(x) * lists, -1, *x.shape[2:])


@dataclass(frozen=True)
class Offered:
    """A step's candidates, all full pages, on the device: B requests with C lists each, N columns.

    Attributes, int32, -1 or less beyond a row's last page:
        table, n_full: ``[B, N]``, ``[B]``.
        n_scored: ``[B]`` as ``n_full``, but 0 where the budget covers them all: then no digest is read.
        lists: C; with one list the others are the same tensors.
        list_table, list_n_full, list_n_scored: ``[B * C, N]``, ``[B * C]``, ``[B * C]`` the same for each list.
        digest_rows: ``[B * C, N]`` rows of digests if each list has its own, page * C + list.
        arrivals: ``[B * C]`` zeroed counters for the scoring kernels; pages are scored for one layer at a time.
    """

    table: torch.Tensor
    n_full: torch.Tensor
    n_scored: torch.Tensor
    lists: int
    list_table: torch.Tensor
    list_n_full: torch.Tensor
    list_n_scored: torch.Tensor
    digest_rows: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def of(
        cls,
        table: torch.Tensor,
        n_full: torch.Tensor,
        lists: int,
        n_scored: torch.Tensor | None = None,
    ) -> Offered:
        """From these (without ``n_scored`` all of ``n_full`` are scored), in fixed buffers; :meth:`fill` before use."""
        n_scored = n_full if n_scored is None else n_scored
        rows, columns = table.shape
        if lists == 1:
            arrivals = table.new_zeros(rows)
            return cls(table, n_full, n_scored, 1, table, n_full, n_scored, table, arrivals)
        sizes = (columns,), (), (), (columns,), ()
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

    def first(self, rows: int) -> Offered:
        """The first ``rows`` requests."""
        each = rows * self.lists
        return Offered(
            self.table[:rows], self.n_full[:rows], self.n_scored[:rows], self.lists,
            self.list_table[:each], self.list_n_full[:each], self.list_n_scored[:each],
            self.digest_rows[:each], self.arrivals[:each],
        )  # fmt: skip
