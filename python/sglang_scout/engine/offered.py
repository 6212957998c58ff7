"""The pages that a step may choose from, for each list of choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def of_lists(x: torch.Tensor, lists: int) -> torch.Tensor:
    """``[B, heads, ...]`` as ``[B * C, heads / C, ...]``: what belongs to each list of chosen pages."""
    return x.contiguous().view(len(x) * lists, -1, *x.shape[2:])


@dataclass(frozen=True)
class Offered:
    """The full pages that a step may choose from, on the device: B requests with C lists each, N columns.

    Attributes, int32, -1 or less beyond a row's last page:
        table, n_full: ``[B, N]``, ``[B]``.
        n_scored: ``[B]`` as ``n_full``, but 0 where the budget covers them all: then no digest need be read.
        lists: C; with one list the others are the same tensors.
        list_table, list_n_full, list_n_scored: ``[B * C, N]``, ``[B * C]``, ``[B * C]`` the same for each list.
        digest_rows: ``[B * C, N]`` places of digests where each list has its own, page * C + list.
        arrivals: ``[B * C]`` zeros, for the kernels that score; pages are scored for one layer at a time.
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
        """Of these, ``n_full`` all scored without ``n_scored``, in buffers that stay where they are; :meth:`fill`
        before use."""
        n_scored = n_full if n_scored is None else n_scored
        rows, columns = table.shape
        if lists == 1:
            arrivals = table.new_zeros(rows)
            return cls(table, n_full, n_scored, 1, table, n_full, n_scored, table, arrivals)
        sizes = (columns,), (), (), (columns,), ()
        made = [table.new_zeros(rows * lists, *size) for size in sizes]
        return cls(table, n_full, n_scored, lists, *made)

    def fill(self, rows: int) -> None:
        """What of the first ``rows`` requests has changed."""
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
        """Of the first ``rows`` requests."""
        each = rows * self.lists
        return Offered(
            self.table[:rows], self.n_full[:rows], self.n_scored[:rows], self.lists,
            self.list_table[:each], self.list_n_full[:each], self.list_n_scored[:each],
            self.digest_rows[:each], self.arrivals[:each],
        )  # fmt: skip
