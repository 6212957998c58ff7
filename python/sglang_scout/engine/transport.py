"""How attention over a layer's missing pages is computed: the routes ``cpu`` and ``fetch``.

A step posts the missing pages of a layer as soon as they are selected and merges their attention into the device's in
that layer; what ``post`` returns is given to ``merge``. A missing page stays non-resident for the whole step, so that
no page is counted twice.

    route   post                                       merge
    cpu     ids and query go to the ring               the CPU's (out, lse) by log-sum-exp
    fetch   pages are copied into staging slots        the real query attends to these

Route ``cpu`` has two implementations. :class:`HostTransport` is the ring's client on the host; ``GraphTransport``
(``graph_transport.py``) launches the ring's kernels, which a CUDA graph can capture and replay. Route ``fetch`` is
:class:`Fetch`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_scout.engine.step_buffers import of_lists
from sglang_scout.engine.stores import Parts
from sglang_scout.engine.trace import DeviceClock
from sglang_scout.ops.attend import attend_pages, merge_states
from sglang_scout.ops.pages import stage_pages
from sglang_scout.worker.client import Ticket, WorkerClient

Attended = tuple[Tensor, Tensor]
"""Attention ``[B, HQ, D]`` over some pages, and its log-sum-exp ``[B, HQ]``."""


class Transport:
    """One layer's post and merge; B requests of C lists of k pages."""

    capturable = True
    """Whether post and merge may be captured in a graph."""

    def __init__(self, waited_ns: Tensor) -> None:
        self.waited_ns = waited_ns
        """``[L]`` int64, total wait time of merges per layer since start."""
        self.stamps: DeviceClock | None = None
        """Timestamps of post and merge where the host only launches them and a timeline is recorded."""

    def pause(self) -> None:
        """Launches until the next step belong to no request: warm-up or capture. Padding rows miss nothing."""

    def begin_step(self, step: int) -> None:
        """Step boundary; ``step`` counts up."""

    def post(self, layer: int, query: Tensor, pages: Tensor, n_pages: Tensor) -> Any:
        """Request attention over the first ``n_pages`` ``[B*C]`` of ``pages`` ``[B*C, k]`` int32, row b * C + c for
        list c of request b, with ``query`` ``[B, HQ, D]``.

        Returns:
            A ticket for :meth:`merge`.
        """
        raise NotImplementedError

    def merge(
        self, layer: int, ticket: Any, query: Tensor, here: Attended, change: Tensor | None = None
    ) -> Tensor:
        """``[B, HQ, D]`` of the dtype of ``query``: the result merged with the device's part.

        Args:
            query: ``[B, HQ, D]``, the layer's real query; here: attention of the device.
            change: ``[B, HQ]`` correction to add to the result's log-sum-exp.
        """
        raise NotImplementedError

    def faults(self) -> list[str]:
        """Why a finished step lacks a part of its attention; empty if none does."""
        return []


class HostTransport(Transport):
    """Route ``cpu`` from the host: the tensors are in its memory (paper Algorithm 1, lines 7 and 12). What the CPU
    attention process does not compute in time, the client computes here."""

    capturable = False

    def __init__(self, parts: Parts, client: WorkerClient) -> None:
        self._client, self._tracer, self._step = client, parts.tracer, 0
        shape, max_batch = parts.shape, parts.sizes.max_batch
        self._waited_ns = np.zeros(shape.num_layers, np.int64)
        super().__init__(torch.from_numpy(self._waited_ns))
        self._out = torch.zeros(max_batch, shape.num_q_heads, shape.head_dim)
        self._lse = torch.zeros(max_batch, shape.num_q_heads)

    def begin_step(self, step: int) -> None:
        self._step = step

    def post(self, layer: int, query: Tensor, pages: Tensor, n_pages: Tensor) -> Ticket | None:
        counts = n_pages.numpy()
        posted = int(counts.sum())
        if not posted:
            return None
        with self._tracer.slice("ahead", "post", layer=layer, pages=posted):
            q, ids = query.float().numpy(), pages.numpy()
            return self._client.post(layer, self._step, q, ids, counts)

    def merge(
        self, layer: int, ticket: Any, query: Tensor, here: Attended, change: Tensor | None = None
    ) -> Tensor:
        out, lse = here
        if ticket is None:
            return out.to(query.dtype)
        cpu_out, cpu_lse = self._out[: len(out)], self._lse[: len(out)]
        start_ns = time.monotonic_ns()
        reply = self._client.wait(ticket, cpu_out.numpy(), cpu_lse.numpy())
        end_ns = time.monotonic_ns()
        self._waited_ns[layer] += end_ns - start_ns
        pages, gave_up_ns = reply.fallback_pages, end_ns
        if pages:  # were computed here in its place
            gave_up_ns = min(start_ns + int(reply.waited_us * 1000), end_ns)
            self._tracer.add("attention", "fallback", gave_up_ns, end_ns, layer=layer, pages=pages)
        self._tracer.add("attention", "wait", start_ns, gave_up_ns, layer=layer)
        if change is not None:
            lse = lse - change  # equivalent: lower the device's part instead
        with self._tracer.slice("attention", "merge", layer=layer):
            return merge_states(out, lse, cpu_out, cpu_lse)[0].to(query.dtype)


class Fetch(Transport):
    """Pages are copied to the device before their layer, with ids from the device.

    There is one staging slot per row and selected page, double-buffered: a layer's pages are posted before those of the
    previous layer are attended to. So every selected page has a slot. With one list per KV head, a slot holds that
    head's part of a page. Copies are launched on the stream that posts.
    """

    def __init__(self, parts: Parts) -> None:
        shape, device, lists = parts.shape, parts.device, parts.sizes.lists
        self._scale, self._lists = shape.scale, lists
        super().__init__(torch.zeros(shape.num_layers, dtype=torch.int64))  # no merge waits
        staging = parts.sizes.max_batch * lists * parts.sizes.budget_pages
        slot = shape.page_size, shape.num_kv_heads // lists, shape.head_dim
        # [K or V, layer parity, slot, S, H / C, D]
        self._staged = torch.zeros((2, 2, staging, *slot), dtype=shape.kv_dtype, device=device)
        self._pages = parts.host.for_copies(device)
        self._slots = torch.arange(staging, dtype=torch.int32, device=device)

    def post(self, layer: int, query: Tensor, pages: Tensor, n_pages: Tensor) -> Tensor:
        """Returns ``[B * C, k]`` the slot of each page, -1 for padding."""
        stage_pages(self._pages, layer, pages, *self._staged[:, layer % 2])
        return self._slots[: pages.numel()].view_as(pages).masked_fill(pages < 0, -1)

    def merge(
        self, layer: int, ticket: Any, query: Tensor, here: Attended, change: Tensor | None = None
    ) -> Tensor:
        by_list, staged = of_lists(query, self._lists), self._staged[:, layer % 2]
        part, part_lse = attend_pages(by_list, *staged, ticket, None, None, self._scale)
        out, lse = here
        of_staged = part.view_as(out).float(), part_lse.view_as(lse)
        return merge_states(out.float(), lse, *of_staged)[0].to(query.dtype)
