"""Route ``fetch``: missing pages are attended to on the device, without the worker."""

from __future__ import annotations

import torch

from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.engine.transport import Transport
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.gather import copy_layer_pages
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.merge import merge_states


def staging_bytes(shape: ModelShape, max_batch: int, budget_pages: int) -> int:
    """Device memory of :class:`Fetch`."""
    return 2 * 2 * max_batch * budget_pages * shape.page_bytes


class Fetch(Transport):
    """Pages come to the device ahead of their layer, ids and all from the device.

    There is one staging slot for each row and chosen page, twice: a layer's pages are posted before those of the
    layer before are attended to. Copies are launched on the step's own stream.

    Args:
        host: where the pages lie.
        budget_pages: k.
        device: where steps run.
    """

    def __init__(
        self,
        host: HostPages,
        shape: ModelShape,
        max_batch: int,
        budget_pages: int,
        device: torch.device,
    ) -> None:
        self._shape, self._budget_pages = shape, budget_pages
        super().__init__(torch.zeros(shape.num_layers, dtype=torch.int64))  # nobody waits
        staging = max_batch * budget_pages
        page = shape.page_size, shape.num_kv_heads, shape.head_dim
        # [K or V, layer parity, slot, S, H, D]
        self._staged = torch.zeros((2, 2, staging, *page), dtype=shape.dtype, device=device)
        self._layers = [
            LayerPages.of([k], [v], device) for k, v in zip(host.k, host.v, strict=True)
        ]
        self._slots = torch.arange(staging, dtype=torch.int32, device=device)
        # Of each layer parity: what copy_layer_pages reads, [layer, page, slot] by row and page.
        self._ids = torch.zeros((2, 3, staging), dtype=torch.int64, device=device)
        self._ids[:, 2] = self._slots
        self._there = torch.full((2, staging), -1, dtype=torch.int32, device=device)

    def post(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, n_pages: torch.Tensor
    ) -> None:
        count, parity = pages.numel(), layer % 2
        wanted = pages.flatten()
        ids = self._ids[parity, :, :count]
        ids[1].copy_(wanted)
        self._there[parity, :count].copy_(self._slots[:count].masked_fill(wanted < 0, -1))
        copy_layer_pages(
            self._layers[layer], ids.contiguous(), *self._staged[:, parity].unsqueeze(1)
        )

    def merge(self, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        rows, parity = len(query), layer % 2
        slots = self._there[parity, : rows * self._budget_pages].view(rows, -1)
        fetched = attend_pages(
            query, *self._staged[:, parity], slots, None, None, self._shape.scale,
            self._shape.logit_cap,
        )  # fmt: skip
        merged, merged_lse = merge_states(out, lse, *fetched)
        out.copy_(merged)
        lse.copy_(merged_lse)
