"""One decode step of GPU-CPU co-attention, on every device (paper Algorithm 1; sections 3.2 to 3.4).

Per layer l: at its input the missing pages of layer l+1 are posted (``ahead.py``). The attention of layer l covers its
resident pages and the page being filled; the result of its own post, made one layer earlier, is merged in.

Within a step the host makes no decisions and reads nothing back, so that all layers can be one CUDA graph. Inputs fixed
by the boundary are in buffers with fixed addresses. A step's selections are read back while the next one runs, and the
host acts on them two boundaries later:

    boundary t   processes the selections of step t-2, maps the copies of boundary t-1, starts new ones
    step t       runs with the inputs of boundary t; the host prepares t+1 meanwhile

A step in which all pages are resident, and few, is dense: no prediction, no selection, full attention.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from sglang_scout.core.profile import StepLog
from sglang_scout.engine import Ids, Ints
from sglang_scout.engine.ahead import Ahead, LookAhead, QueryProjector, Selector
from sglang_scout.engine.boundary import StepBoundary
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.engine.pages import Pages
from sglang_scout.engine.recall import Recall
from sglang_scout.engine.requests import Requests
from sglang_scout.engine.step_buffers import StepInputs, StepResults
from sglang_scout.engine.stores import Parts
from sglang_scout.engine.trace import DeviceClock
from sglang_scout.engine.transport import Fetch, HostTransport, Transport
from sglang_scout.engine.verify import Verifier
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.pages import Pool, append_tokens
from sglang_scout.worker.client import WorkerClient


class StepEngine:
    """Runs decode steps for one rank.

    Args:
        projectors: of each layer's query.
        verify: compare every layer with the reference.
        step_log: gets a line for each step whose results have arrived; closed with the engine.

    Attributes:
        is_dense: of the current step, or the one being captured, then set by the caller.
        has_dense_steps: whether any may be.
        compare_next: set it, and the next step compares predicted with real queries, unless a graph replays it. With a
            step log every step does, and graphs too.
        requests, pages: track requests and owners of pages.
    """

    def __init__(
        self,
        parts: Parts,
        projectors: Sequence[QueryProjector],
        worker: WorkerClient | GraphTransport,
        verify: bool = False,
        step_log: StepLog | None = None,
    ) -> None:
        self.parts, self._step_log, self._step = parts, step_log, 0
        self.transport = transport = _transport_to(worker, parts)
        self.recall = Recall(parts)
        self.pages = Pages(parts, self.recall)
        self.requests = Requests(parts, self.pages)
        self._clock = transport.stamps or parts.tracer
        self._inputs = StepInputs(parts.table, parts.sizes, parts.device)
        of_results = transport.waited_ns, parts.device, transport.stamps
        self._results = StepResults(parts.sizes, *of_results)
        # A verified layer synchronizes with the host, so no step can be captured.
        self._verifier = Verifier(parts) if verify else None
        of_step = transport, self._inputs, self._results
        self.selector: Selector = parts.policy.selector(parts, *of_step[:2]) or LookAhead(
            parts, *of_step, projectors, self._verifier, self._clock
        )
        self.has_dense_steps, self.is_dense = self.selector.dense_pages is not None, False
        before = self.recall, self.pages, self.requests, self._results
        self._boundary = StepBoundary(parts, *before, self.selector, step_log)
        self._compares, self.compare_next = step_log is not None, False
        self._in_layer = ExitStack()  # a slice of the timeline
        estimates = parts.policy.route == "cpu" and parts.digests.mass_change is not None
        self._reweighs = parts.policy.rule.reweigh and estimates
        # Capture runs the layers; kernels of boundaries would otherwise be compiled in the first request.
        parts.digests.compile_kernels(parts.host, parts.resident.as_layers())
        self.recall.compile_kernels()

    @property
    def can_replay(self) -> bool:
        """Whether a captured graph may run steps."""
        return self.transport.capturable and self._verifier is None

    def pause(self) -> None:
        """Launches until the next step affect no request: warm-up or capture."""
        self._inputs.clear()
        self._compares = self._step_log is not None
        self.transport.pause()
        self.selector.pause()

    def begin_step(self, page_table: Ints, request_slots: Ids, seq_lens: Ids) -> None:
        """Step boundary; see ``boundary.py``.

        Args:
            page_table: ``[B, N]`` host page ids; entries past a request's last page are ignored.
            request_slots: ``[B]`` row of each request in SGLang's request table.
            seq_lens: ``[B]`` length, including this step's token.
        """
        (rows, columns), sizes, tracer = page_table.shape, self.parts.sizes, self.parts.tracer
        if rows > sizes.max_batch or columns > sizes.max_pages:
            raise ValueError(f"batch of {rows} rows, {columns} pages; buffers are for {sizes}")
        self._step += 1
        self._compares, self.compare_next = self._step_log is not None or self.compare_next, False
        self.parts.counters.steps += 1
        tracer.step(self._step)
        with tracer.slice("boundary", "step boundary", requests=rows):
            batch = self._boundary.begin(self._step, page_table, request_slots, seq_lens)
            self.is_dense = batch.is_dense
            self._check_faults()
            self._inputs.send(batch)
            self.transport.begin_step(self._step)

    def end_step(self) -> None:
        """Before a step's tokens are returned: none may lack a part of its attention.

        The step's results have arrived, and so has what its merges wrote to the host. A later step's fault fails this
        one as well: the server ends in any case.

        Raises:
            RuntimeError: no result within the ring's timeout, or a refused record.
        """
        self._results.ended(time.monotonic_ns())
        self._check_faults()

    def _check_faults(self) -> None:
        if faults := self.transport.faults():
            raise RuntimeError(
                f"--kv-offload: part of a decode step's attention is missing: {', '.join(faults)}; its tokens are not "
                "returned, and the server ends: restart it"
            )

    def layer_input(
        self, layer: int, x: Tensor, residual: Tensor | None, positions: Tensor
    ) -> None:
        """Before layer ``layer``: predict and post for the layers that the policy names, on the side stream.

        ``x`` and ``residual`` ``[B, hidden]`` sum to the layer's input before its norm; the layer may overwrite both.
        ``positions`` ``[B]`` int64; B up to ``sizes.max_batch``.
        """
        self.layer_output()
        if layer == 0 and self.transport.stamps is not None:
            self.transport.stamps.begin_layers(self.is_dense)
        self._in_layer.enter_context(self._clock.slice("device", "layer", layer=layer))
        if not self.is_dense:
            self.selector.layer_input(layer, x, residual, positions)

    def layer_output(self) -> None:
        """The current layer has ended; implied by the next layer's input."""
        self._in_layer.close()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer: append, attend on the device, merge the missing part.

        Args:
            q: ``[B, HQ, D]`` real query after RoPE; B up to ``sizes.max_batch``.
            k, v: ``[B, H, D]`` of the new token.
        Returns:
            ``[B, HQ, D]`` of the dtype of ``q``.
        """
        query, rows, inputs, resident = q.contiguous(), len(q), self._inputs, self.parts.resident
        tail = inputs.tail_slot[layer, :rows], inputs.tail_len[:rows]
        in_slots, slot_of = (resident.k[layer], resident.v[layer]), inputs.slot_of[layer]
        in_pages = self.parts.host.k[layer], self.parts.host.v[layer]
        mirror = Pool(*in_pages, inputs.tail_page[:rows])
        append_tokens(k, v, tail[1], Pool(*in_slots, tail[0]), mirror=mirror)
        ahead = self._all_pages(query) if self.is_dense else self.selector.take(layer, query)
        with self._clock.slice("attention", "attend", layer=layer):
            of_device = *in_slots, ahead.pages, *tail, self.parts.shape.scale
            here = attend_pages(query, *of_device, slot_of=slot_of, n_pages=ahead.n_pages)
        change = None
        if self.is_dense:
            out = here[0].to(query.dtype)
        else:
            window = in_slots[0], ahead.pages, slot_of, *tail
            self.selector.attended(layer, query, here[1], *window)
            change = self._mass_change(layer, query, ahead)
            out = self.transport.merge(layer, ahead.ticket, query, here, change)
        if self._verifier is not None:
            with self.parts.tracer.slice("attention", "verify", layer=layer):
                batch = self._results.launched[-1].batch
                self._verifier.check(layer, out, query, ahead, slot_of, batch, change)
        return out

    def _all_pages(self, query: Tensor) -> Ahead:
        """Of a dense step: every page is resident."""
        of = self._inputs.candidates.first(len(query))
        return Ahead(query, of.table, of.n_full, of.list_table[:, :0], of.list_n_full)

    def _mass_change(self, layer: int, query: Tensor, ahead: Ahead) -> Tensor | None:
        """``[B, HQ]`` by how much the log mass of the missing pages grows with the real query; None: is not known, or
        the real query attends to them."""
        if ahead.query is query:
            return None
        if self._compares:
            live = self._inputs.tail_len[: len(query)] > 0
            self._results.compare(layer, query, ahead.query, live)
        if not self._reweighs:
            return None
        with self._clock.slice("attention", "mass", layer=layer):
            missing = ahead.missing, ahead.n_missing, self.parts.shape.scale
            return self.parts.digests.mass_change(layer, query, ahead.query, *missing)

    def close(self) -> None:
        """Wait for launched work, stop the copies and write the trace."""
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize(self.parts.device)
        self.recall.close()
        self.selector.close()
        if self._step_log is not None:
            self._step_log.close()
        self.parts.tracer.write()


def _transport_to(worker: WorkerClient | GraphTransport, parts: Parts) -> Transport:
    if parts.policy.route == "fetch":
        return Fetch(parts)
    if not isinstance(worker, GraphTransport):
        return HostTransport(parts, worker)
    if parts.tracer.active:  # the host only launches; the timeline needs device timestamps
        worker.stamps = DeviceClock(parts.tracer, parts.shape.num_layers, parts.device)
    return worker
