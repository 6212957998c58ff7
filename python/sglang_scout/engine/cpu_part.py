"""The share of a layer's attention that is computed off the device: posted ahead, merged when due."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.counters import Counters
from sglang_scout.engine.pools import ModelShape
from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.merge import merge_states


class Reply(Protocol):
    waited_us: float
    fallback_pages: int


class MissingCompute(Protocol):
    """Attention over pages that are not resident; answered by the worker or by its stand-in."""

    def post(
        self,
        layer: int,
        step: int,
        q: npt.NDArray[np.float32],
        pages: npt.NDArray[np.int32],
        n_pages: npt.NDArray[np.int32],
    ) -> Any: ...

    def wait(
        self, ticket: Any, out: npt.NDArray[np.float32], lse: npt.NDArray[np.float32]
    ) -> Reply: ...


class CpuPart:
    """Posts a layer's missing pages and merges the answer (paper Algorithm 1, lines 7 and 12).

    Args:
        missing: who computes.
        shape: sizes of the model on this rank.
        max_batch: most rows in a step; the answers' buffers are made once.
    """

    def __init__(
        self,
        missing: MissingCompute,
        shape: ModelShape,
        max_batch: int,
        counters: Counters,
        tracer: Tracer,
    ) -> None:
        self._missing = missing
        self._counters = counters
        self._tracer = tracer
        answer = (shape.num_layers, max_batch, shape.num_q_heads)
        self._out = np.zeros((*answer, shape.head_dim), np.float32)
        self._lse = np.full(answer, -np.inf, np.float32)

    def post(
        self,
        layer: int,
        step: int,
        query: torch.Tensor,
        pages: npt.NDArray[np.int32],
        n_pages: npt.NDArray[np.int32],
    ) -> Any:
        """Ask for the attention of ``query`` ``[B, HQ, D]`` fp32 over ``pages`` ``[B, k]``, packed to
        the left; a ticket, or None where no row has a page (``n_pages`` ``[B]``)."""
        posted = int(n_pages.sum())
        if not posted:
            return None
        start_ns = self._tracer.now()
        ticket = self._missing.post(layer, step, query.numpy(), pages, n_pages)
        self._tracer.cut("ahead", "post", start_ns, layer=layer, pages=posted)
        return ticket

    def merge(
        self, layer: int, ticket: Any, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the answer and merge it into the device's ``out`` ``[B, HQ, D]``, ``lse`` ``[B, HQ]``."""
        rows = out.shape[0]
        cpu_out, cpu_lse = self._out[layer, :rows], self._lse[layer, :rows]
        start_ns = time.monotonic_ns()
        reply = self._missing.wait(ticket, cpu_out, cpu_lse)
        end_ns = time.monotonic_ns()
        self._trace_answer(layer, start_ns, end_ns, reply)
        self._counters.count_wait(layer, (end_ns - start_ns) // 1000)
        merged = merge_states(out, lse, torch.from_numpy(cpu_out), torch.from_numpy(cpu_lse))
        self._tracer.cut("attention", "merge", end_ns, layer=layer)
        return merged

    def _trace_answer(self, layer: int, start_ns: int, end_ns: int, reply: Reply) -> None:
        """The wait for the worker, and what was computed here instead of its answer."""
        if not reply.fallback_pages:
            self._tracer.add("attention", "wait", start_ns, end_ns, layer=layer)
            return
        gave_up_ns = min(start_ns + int(reply.waited_us * 1000), end_ns)
        self._tracer.add("attention", "wait", start_ns, gave_up_ns, layer=layer)
        self._tracer.add(
            "attention", "fallback", gave_up_ns, end_ns, layer=layer, pages=reply.fallback_pages
        )
