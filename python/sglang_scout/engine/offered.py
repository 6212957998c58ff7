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
        lists: C; with one list the others are the same tensors.
        list_table, list_n_full: ``[B * C, N]``, ``[B * C]`` the same for each list.
        digest_rows: ``[B * C, N]`` places of digests where each list has its own, page * C + list.
    """

    table: torch.Tensor
    n_full: torch.Tensor
    lists: int
    list_table: torch.Tensor
    list_n_full: torch.Tensor
    digest_rows: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor, n_full: torch.Tensor, lists: int) -> Offered:
        """Of ``table`` and ``n_full``, in buffers that stay where they are; :meth:`fill` before use."""
        if lists == 1:
            return cls(table, n_full, 1, table, n_full, table)
        rows, columns = table.shape
        made = [table.new_zeros(rows * lists, *size) for size in ((columns,), (), (columns,))]
        return cls(table, n_full, lists, *made)

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
        n_full = self.list_n_full[: rows * self.lists].view(rows, self.lists)
        n_full.copy_(self.n_full[:rows, None].expand_as(n_full))

    def first(self, rows: int) -> Offered:
        """Of the first ``rows`` requests."""
        each = rows * self.lists
        return Offered(
            self.table[:rows], self.n_full[:rows], self.lists, self.list_table[:each],
            self.list_n_full[:each], self.digest_rows[:each],
        )  # fmt: skip
