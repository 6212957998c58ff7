"""Reference check of one layer's co-attention output, for tests and debugging."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.counters import Counters
from sglang_scout.engine.step_inputs import Batch
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.layers import resident_slots
from sglang_scout.policy.base import Route

NOT_FINITE = float(np.finfo(np.float32).max)
"""Deviation reported for NaN or infinity: larger than any other, and valid in JSON."""


class Verifier:
    """Compares layers' outputs with the reference and keeps the maximum deviation."""

    def __init__(
        self, host: HostPages, shape: ModelShape, route: Route, counters: Counters
    ) -> None:
        self._host, self._shape = host, shape
        self._route, self._counters = route, counters

    def check(
        self,
        layer: int,
        out: torch.Tensor,
        q: torch.Tensor,
        q_ahead: torch.Tensor,
        pages: torch.Tensor,
        slot_of: torch.Tensor,
        missing: torch.Tensor,
        batch: Batch,
        mass_change: torch.Tensor | None,
    ) -> None:
        """Tensors as of :func:`relative_error`, on the device, which attended to those of ``pages`` that have a slot;
        ``missing`` ``[B * C, k]`` takes the policy's route. ``pages`` may be one list for all heads."""
        is_resident = resident_slots(slot_of, pages) >= 0
        attended, on_cpu = torch.where(is_resident, pages, -1).cpu(), missing.cpu()
        attended = attended.repeat_interleave(len(on_cpu) // len(attended), dim=0)
        if self._route != "cpu":  # attended to with the real query, or dropped
            if self._route == "fetch":
                attended = torch.cat([attended, on_cpu], dim=1)
            on_cpu, q_ahead = torch.full_like(on_cpu, -1), q
        error = relative_error(
            out.cpu(),
            q.cpu(),
            q_ahead.cpu(),
            attended.numpy(),
            on_cpu.numpy(),
            batch.tail_page.numpy(),
            batch.tail_len.numpy(),
            self._host.k[layer],
            self._host.v[layer],
            self._shape.scale,
            torch.zeros(q.shape[:2]) if mass_change is None else mass_change.cpu(),
            None if (kept := self._host.context) is None else (kept.k[layer], kept.v[layer]),
        )
        self._counters.verify_checks += 1
        self._counters.verify_max_rel_error = max(self._counters.verify_max_rel_error, error)


def co_attention_reference(
    q: torch.Tensor,
    q_ahead: torch.Tensor,
    k_device: torch.Tensor,
    v_device: torch.Tensor,
    k_cpu: torch.Tensor,
    v_cpu: torch.Tensor,
    scale: float,
    mass_change: torch.Tensor | None = None,
) -> torch.Tensor:
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
    logits = []
    for query, keys in ((q, k_device), (q_ahead, k_cpu)):
        keys = keys.float().repeat_interleave(group, dim=1)
        logits.append(torch.einsum("hd,thd->ht", query.float(), keys) * scale)
    if mass_change is not None:
        logits[1] = logits[1] + mass_change[:, None]
    weights = torch.cat(logits, dim=1).softmax(dim=1)
    values = torch.cat([v_device, v_cpu]).float().repeat_interleave(group, dim=1)
    return torch.einsum("ht,thd->hd", weights, values)


def relative_error(
    out: torch.Tensor,
    q: torch.Tensor,
    q_ahead: torch.Tensor,
    on_device: npt.NDArray[np.int32],
    on_cpu: npt.NDArray[np.int32],
    tail_page: npt.NDArray[np.int32],
    tail_len: npt.NDArray[np.int32],
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mass_change: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> float:
    """Maximum deviation of ``out`` from the reference over exactly the same pages, relative to its largest value;
    NOT_FINITE if either has a NaN or an infinity. All K and V are read from the host pages, the ground truth, not from
    the device's copies.

    Args:
        out, q, q_ahead: ``[B, HQ, D]``.
        on_device, on_cpu: ``[B * C, any]`` full host pages of each part and list, -1 entries ignored; for the CPU also
            ids of kept tokens.
        tail_page, tail_len: of each request the page being filled, and its valid tokens; other rows are padding.
        k, v: ``[P, S, H, D]`` host pages of the layer.
        mass_change: ``[B, HQ]``, see :func:`co_attention_reference`.
        context: ``[C, S, D]`` K and V of kept tokens.
    """
    worst = 0.0
    requests = out.shape[0]
    lists = len(on_cpu) // requests
    in_use = len(tail_len) * lists  # behind them padding
    of_list = [
        x.reshape(requests * lists, -1, *x.shape[2:]) for x in (out, q, q_ahead, mass_change)
    ]
    for row, (found, real, ahead, change) in enumerate(
        zip(*(x[:in_use] for x in of_list), strict=True)
    ):
        device = torch.from_numpy(on_device[row][on_device[row] >= 0]).long()
        cpu = torch.from_numpy(on_cpu[row][on_cpu[row] >= 0]).long()
        request, head = divmod(row, lists)
        length, tail = int(tail_len[request]), int(tail_page[request])
        keys, values = ((x if lists == 1 else x[:, :, head : head + 1]) for x in (k, v))
        kept_k, kept_v = context or (None, None)
        reference = co_attention_reference(
            real,
            ahead,
            torch.cat([keys[device].flatten(0, 1), keys[tail, :length]]),
            torch.cat([values[device].flatten(0, 1), values[tail, :length]]),
            _listed(cpu, keys, kept_k),
            _listed(cpu, values, kept_v),
            scale,
            change,
        )
        gap = float((found - reference).abs().max() / reference.abs().max().clamp_min(1e-20))
        worst = max(worst, gap if math.isfinite(gap) else NOT_FINITE)
    return worst


def _listed(ids: torch.Tensor, pages: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """``[T, H, D]`` tokens of a list: of host pages, or kept ones, see :meth:`ContextCache.worker_ids`."""
    first, size = pages.shape[:2]
    if context is None or not len(ids) or int(ids[0]) < first:
        return pages[ids].flatten(0, 1)
    places = [divmod(i - first, size) for i in ids.tolist()]
    return torch.cat([context[page, : last + 1] for page, last in places])[:, None]
