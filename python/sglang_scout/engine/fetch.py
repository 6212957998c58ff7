"""Route ``fetch``: missing pages are attended to on the device, without CPU attention."""

from __future__ import annotations

import torch

from sglang_scout.engine.offered import of_lists
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.engine.transport import Transport
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.merge import merge_states
from sglang_scout.ops.stage import stage_pages


def staging_bytes(shape: ModelShape, max_batch: int, budget_pages: int) -> int:
    """Device memory of :class:`Fetch`."""
    return 2 * 2 * max_batch * budget_pages * shape.page_bytes


class Fetch(Transport):
    """Pages are copied to the device before their layer, with ids from the device.

    There is one staging slot per row and selected page, double-buffered: a layer's pages are posted before those of the
    previous layer are attended to. So every selected page has a slot. With one list per KV head, a slot holds that
    head's part of a page. Copies are launched on the stream that posts.

    Args:
        host: the source pages.
        lists: C, of each request.
        budget_pages: k, of each list.
        device: where steps run.
    """

    def __init__(
        self,
        host: HostPages,
        shape: ModelShape,
        max_batch: int,
        lists: int,
        budget_pages: int,
        device: torch.device,
    ) -> None:
        self._shape, self._budget_pages, self._lists = shape, budget_pages, lists
        super().__init__(torch.zeros(shape.num_layers, dtype=torch.int64))  # no merge waits
        staging = max_batch * lists * budget_pages
        slot = shape.page_size, shape.num_kv_heads // lists, shape.head_dim
        # [K or V, layer parity, slot, S, H / C, D]
        self._staged = torch.zeros((2, 2, staging, *slot), dtype=shape.kv_dtype, device=device)
        self._pages = host.for_copies(device)
        self._slots = torch.arange(staging, dtype=torch.int32, device=device)
        # Per layer parity: the slot by row and page, -1 where nothing was posted.
        self._there = torch.full((2, staging), -1, dtype=torch.int32, device=device)

    def post(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, n_pages: torch.Tensor
    ) -> None:
        count, parity = pages.numel(), layer % 2
        slots = self._slots[:count].masked_fill(pages.flatten() < 0, -1)
        self._there[parity, :count].copy_(slots)
        stage_pages(self._pages, layer, pages, *self._staged[:, parity])

    def merge(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        change: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, parity = len(query) * self._lists, layer % 2
        slots = self._there[parity, : rows * self._budget_pages].view(rows, -1)
        part, part_lse = attend_pages(
            of_lists(query, self._lists), *self._staged[:, parity], slots, None, None, self._shape.scale
        )  # fmt: skip
        parts = out.float(), lse, part.view_as(out).float(), part_lse.view_as(lse)
        merged, _ = merge_states(*parts)
        return merged.to(query.dtype)
