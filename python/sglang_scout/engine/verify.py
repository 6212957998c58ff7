"""Reference check of one layer's co-attention output, for tests and debugging."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sglang_scout.engine.requests import Batch
from sglang_scout.engine.stores import Parts
from sglang_scout.ops.pages import resident_slots

if TYPE_CHECKING:
    from sglang_scout.engine.ahead import Ahead

NOT_FINITE = float(np.finfo(np.float32).max)
"""Deviation reported for NaN or infinity: larger than any other, and valid in JSON."""


class Verifier:
    """Compares layers' outputs with the reference and keeps the maximum deviation."""

    def __init__(self, parts: Parts) -> None:
        self._host, self._shape, self._counters = parts.host, parts.shape, parts.counters
        self._ranks = None if parts.policy.rule.by_head else parts.ranks
        self._fetches = parts.policy.route == "fetch"

    def check_selection(self, pages: Tensor) -> None:
        """Whether all ranks have selected these ``pages`` (any shape)."""
        if self._ranks is not None:
            found = zlib.crc32(pages.cpu().numpy().tobytes())
            both = torch.tensor([found, -found], device=pages.device)
            largest, least = self._ranks.combine(both, "max").tolist()
            self._counters.verify_unequal_selections += largest != -least

    def check(
        self,
        layer: int,
        out: Tensor,
        q: Tensor,
        ahead: Ahead,
        slot_of: Tensor,
        batch: Batch,
        mass_change: Tensor | None,
    ) -> None:
        """Compare ``out`` ``[B, HQ, D]`` with the reference over exactly the same pages, relative to its largest value.

        All K and V are read from the host pages, the ground truth, not from the device's copies.

        Args:
            slot_of: ``[P]`` the device attended to those of ``ahead.pages`` that have a slot.
            batch: rows behind its requests are padding.
            mass_change: ``[B, HQ]``, see :func:`co_attention_reference`.
        """
        q_ahead, is_resident = ahead.query, resident_slots(slot_of, ahead.pages) >= 0
        on_device = torch.where(is_resident, ahead.pages, -1).cpu()
        places = torch.arange(ahead.missing.shape[1], device=ahead.missing.device)
        on_cpu = torch.where(places < ahead.n_missing[:, None], ahead.missing, -1).cpu()
        rows, lists = len(on_cpu), len(on_cpu) // len(out)
        on_device = on_device.repeat_interleave(rows // len(on_device), dim=0)
        if self._fetches:  # attended to with the real query
            on_device, q_ahead = torch.cat([on_device, on_cpu], dim=1), q
            on_cpu = torch.full_like(on_cpu, -1)
        change = torch.zeros(q.shape[:2]) if mass_change is None else mass_change
        by_list = [x.cpu().reshape(rows, -1, *x.shape[2:]) for x in (out, q, q_ahead, change)]
        planes, worst = (self._host.k[layer], self._host.v[layer]), 0.0
        for row in range(len(batch.tail_len) * lists):
            request, head = divmod(row, lists)
            heads = slice(None) if lists == 1 else slice(head, head + 1)
            tail = int(batch.tail_page[request]), slice(int(batch.tail_len[request])), heads
            full = self._tokens(layer, on_device[row], heads)
            device = [torch.cat([x, of[tail]]) for x, of in zip(full, planes, strict=True)]
            cpu = self._tokens(layer, on_cpu[row], heads)
            found, real, ahead, added = (x[row] for x in by_list)
            expected = co_attention_reference(real, ahead, *device, *cpu, self._shape.scale, added)
            gap = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-20))
            worst = max(worst, gap if math.isfinite(gap) else NOT_FINITE)
        counters = self._counters
        counters.verify_checks += 1
        counters.verify_max_rel_error = max(counters.verify_max_rel_error, worst)

    def _tokens(self, layer: int, ids: Tensor, heads: slice) -> list[Tensor]:
        """K and V ``[T, H, D]`` of a list: of host pages, or kept tokens, see :meth:`ContextCache.worker_ids`."""
        host, ids = self._host, ids[ids >= 0].long()
        if host.context is None or not len(ids) or int(ids[0]) < host.num_pages:
            return [of[layer][ids][:, :, heads].flatten(0, 1) for of in (host.k, host.v)]
        size = self._shape.page_size
        places = [divmod(i - host.num_pages, size) for i in ids.tolist()]
        kept = host.context.k[layer], host.context.v[layer]
        return [torch.cat([x[page, : last + 1] for page, last in places])[:, None] for x in kept]


def co_attention_reference(
    q: Tensor,
    q_ahead: Tensor,
    k_device: Tensor,
    v_device: Tensor,
    k_cpu: Tensor,
    v_cpu: Tensor,
    scale: float,
    mass_change: Tensor,
) -> Tensor:
    """One softmax over both parts, each with its own query (paper Algorithm 1, lines 7 and 10-12).

    Args:
        q, q_ahead: ``[HQ, D]`` real and predicted query.
        k_device, v_device: ``[T1, H, D]`` tokens that the device attends to with ``q``.
        k_cpu, v_cpu: ``[T2, H, D]`` tokens that the CPU attends to with ``q_ahead``.
        mass_change: ``[HQ]`` added to the logits of the CPU's tokens.
    Returns:
        ``[HQ, D]`` fp32.
    """
    group = q.shape[0] // k_device.shape[1]
    on_device, on_cpu = (
        torch.einsum("hd,thd->ht", x.float(), k.float().repeat_interleave(group, dim=1)) * scale
        for x, k in ((q, k_device), (q_ahead, k_cpu))
    )
    weights = torch.cat([on_device, on_cpu + mass_change[:, None]], dim=1).softmax(dim=1)
    values = torch.cat([v_device, v_cpu]).float().repeat_interleave(group, dim=1)
    return torch.einsum("ht,thd->hd", weights, values)
