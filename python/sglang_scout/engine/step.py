"""One decode step of GPU-CPU co-attention, on every device (paper Algorithm 1; sections 3.2 to 3.4).

Per layer l: at its input the query of layer l+1 is predicted and its important pages selected; those not resident are
posted at once. The attention of layer l covers its resident pages and the page being filled; the result of its own
post, made one layer earlier, is merged in.

Within a step the host makes no decisions and reads nothing back, so that all layers can be one CUDA graph. Inputs fixed
by the boundary are in buffers with fixed addresses. A step's selections are read back while the next one runs, and the
host acts on them two boundaries later:

    boundary t   processes the selections of step t-2, maps the copies of boundary t-1, starts new ones
    step t       runs with the inputs of boundary t; the host prepares t+1 meanwhile

A step in which all pages are resident, and few, is dense: no prediction, no selection, full attention.

Selection runs on a side stream (``ForkedStream``). On the CPU device the same code runs on host memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.boundary import StepBoundary
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.device import ForkedStream, SideStream, upload
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.lifecycle import PageLifecycle
from sglang_scout.engine.older_tokens import OlderTokens
from sglang_scout.engine.recall import Recall
from sglang_scout.engine.step_inputs import StepInputs, of_lists
from sglang_scout.engine.step_results import StepResults
from sglang_scout.engine.stores import HostPages, ModelShape, ResidentCache, Sizes
from sglang_scout.engine.tensor_parallel import Ranks, SharedChoice
from sglang_scout.engine.trace import Tracer
from sglang_scout.engine.transport import Attended, Transport
from sglang_scout.engine.verify import Verifier
from sglang_scout.ops.attend import Attend
from sglang_scout.ops.pages import Pool, append_tokens
from sglang_scout.ops.predict import QueryProjector
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.ops.select import Selection, select_pages
from sglang_scout.policy.base import Policy


class StepEngine:
    """Runs decode steps for one rank; arguments as of ``build_engine``.

    Args:
        transport: how missing pages are computed.
        attend: attention on the device.
        verify: compare every layer's output with a plain fp32 reference over the host pages, and the ranks' selections
            with each other. Every layer then synchronizes with the host, so no step can be captured.

    Attributes:
        resident, table: the resident cache and its table.
        is_dense: of the current step, or the one being captured; ``has_dense_steps``: whether any may be.
        boundary, pages: prepare steps, and track page owners.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        sizes: Sizes,
        host: HostPages,
        digests: DigestPool,
        projectors: Sequence[QueryProjector],
        transport: Transport,
        attend: Attend,
        *,
        device: torch.device,
        tracer: Tracer,
        verify: bool,
        ranks: Ranks | None,
        has_dense_steps: bool,
    ) -> None:
        self.policy, self.shape, self.sizes = policy, shape, sizes
        self.host, self.digests, self.transport, self.tracer = host, digests, transport, tracer
        self.counters = counters = Counters(shape.num_layers)
        self._attend = attend
        self.resident = ResidentCache(shape, sizes.num_slots, device)
        self._device = device = self.resident.k.device  # with its index
        self.table = table = ResidencyTable(shape.num_layers, host.num_pages, sizes.num_slots)
        side = SideStream(device) if device.type == "cuda" else None
        stamps, self._clock = transport.stamps, transport.stamps or tracer
        self.recall = Recall(host, self.resident, table, counters, shape.page_bytes, tracer, side)
        slots = self.resident.as_layers()
        self.pages = PageLifecycle(host, digests, table, slots)
        self._inputs = StepInputs(shape.num_layers, sizes, device)
        self._results = StepResults(shape.num_layers, sizes, transport.waited_ns, device, stamps)
        self.older: OlderTokens | None = None
        if policy.feedback is not None:
            stores = shape, sizes, host, counters, device
            self.older = OlderTokens(policy, transport, *stores, verify, attend)
        self.has_dense_steps, self.is_dense = has_dense_steps, False
        predicts = policy.query.targets(0, 2)
        ahead_bytes = max((p.weight_bytes for p in projectors), default=0) if predicts else 0
        dense_pages = ahead_bytes // (2 * shape.page_bytes)
        self.boundary = StepBoundary(
            policy,
            sizes,
            shape.page_size,
            table,
            self.pages,
            self.recall,
            self._results,
            counters,
            self.older,
            dense_pages if has_dense_steps else None,
        )
        table.take_changes()
        self._slot_of = upload(table.slot_of, device).clone()
        self._shared = SharedChoice(ranks, policy.rule) if ranks else None
        self._beside = ForkedStream(None if self._shared else device)  # collectives need order
        self._verifier = Verifier(host, shape, policy.route, self.counters) if verify else None
        self._projectors, self._step = projectors, 0
        self._open_layer, self._layer_start_ns = -1, 0  # for the timeline
        on_cpu = policy.route == "cpu"
        self._reweighs = policy.rule.reweigh and on_cpu and digests.has_estimates
        self._posts_late = on_cpu and not policy.query.attends
        self._chosen: dict[int, tuple[torch.Tensor, Selection]] = {}  # layer: query, selection
        # Capture runs the layers; kernels of boundaries would otherwise be compiled in the first request.
        digests.compile_kernels(host, slots)
        self.recall.compile_kernels()

    @property
    def can_replay(self) -> bool:
        """Whether a captured graph may run steps."""
        return self.transport.capturable and self._verifier is None

    def pause(self) -> None:
        """Launches until the next step affect no request: warm-up or capture."""
        self._inputs.clear()
        self.transport.pause()
        if self.older is not None:
            self.older.pause()

    def begin_step(
        self,
        page_table: npt.NDArray[np.int32],
        request_slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
    ) -> None:
        """Step boundary; see ``boundary.py``.

        Args:
            page_table: ``[B, N]`` host page ids; entries past a request's last page are ignored.
            request_slots: ``[B]`` row of each request in SGLang's request table.
            seq_lens: ``[B]`` length, including this step's token.
        """
        rows, columns = page_table.shape
        if rows > self.sizes.max_batch or columns > self.sizes.max_pages:
            raise ValueError(f"batch of {rows} rows, {columns} pages; buffers are for {self.sizes}")
        start_ns = self.tracer.now()
        self._step += 1
        self.counters.steps += 1
        self.tracer.step(self._step)
        batch = self.boundary.begin(self._step, page_table, request_slots, seq_lens)
        self.is_dense = batch.is_dense
        self._check_faults()
        changed, slots = self._inputs.send(batch, *self.table.take_changes())
        if len(changed):
            self._slot_of.view(-1).index_copy_(0, changed, slots)
        self.transport.begin_step(self._step)
        self._beside.join()
        self._chosen.clear()
        self.tracer.cut("boundary", "step boundary", start_ns, requests=rows)

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
                f"--kv-offload: part of a decode step's attention is missing: {', '.join(faults)}; its "
                "tokens are not returned"
            )

    def layer_input(
        self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """Before layer ``layer``: predict and post for the layers that the policy names, on the side stream.

        ``x`` and ``residual`` ``[B, hidden]`` sum to the layer's input before its norm; the layer may overwrite both.
        ``positions`` ``[B]`` int64; B up to ``sizes.max_batch``.
        """
        self.layer_output()
        if layer == 0 and self.transport.stamps is not None and not self.is_dense:
            self.transport.stamps.begin_layers()
        self._open_layer, self._layer_start_ns = layer, self._clock.now()
        if self.is_dense:
            return
        for target in self.policy.query.targets(layer, self.shape.num_layers):
            start_ns, projector = self._clock.now(), self._projectors[target]
            read = projector.start(x, residual)
            with self._beside.fork(target, read, positions):
                query = projector.finish(read, positions)
                self._clock.cut("ahead", "predict", start_ns, layer=target)
                self._look_ahead(target, query)

    def layer_output(self) -> None:
        """The current layer has ended; implied by the next layer's input."""
        if self._open_layer >= 0:
            self._clock.cut("device", "layer", self._layer_start_ns, layer=self._open_layer)
            self._open_layer = -1

    def _look_ahead(self, layer: int, query: torch.Tensor) -> None:
        """Select the pages of ``layer`` and post the missing ones (Algorithm 1, lines 4 to 7)."""
        rule, candidates = self.policy.rule, self._inputs.candidates.first(len(query))
        by_list = of_lists(query, self.sizes.lists)
        start_ns = self._clock.now()
        scores = self.digests.score(layer, by_list, candidates, self.shape.scale, rule.head_reduce)
        scores = self._shared.scores(scores) if self._shared is not None else scores
        start_ns = self._clock.cut("ahead", "score", start_ns, layer=layer)
        selection = select_pages(
            scores,
            candidates.list_table,
            candidates.list_n_full,
            self._slot_of[layer],
            self.sizes.budget_pages,
            rule.sink_pages,
            rule.recent_pages,
            rule.mass,
            out=self._results.of(layer, len(by_list)),
        )
        if self._shared is not None and self._verifier is not None:
            self.counters.verify_unequal_selections += not self._shared.is_same(selection.pages)
        self._clock.cut("ahead", "select", start_ns, layer=layer)
        if not self._posts_late:
            self.transport.post(layer, query.contiguous(), selection.missing, selection.n_missing)
        self._chosen[layer] = query, selection

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer: append, attend on the device, merge the missing part.

        Args:
            q: ``[B, HQ, D]`` real query after RoPE; B up to ``sizes.max_batch``.
            k, v: ``[B, H, D]`` of the new token.
        Returns:
            ``[B, HQ, D]`` of the dtype of ``q``.
        """
        rows, inputs, shape = len(q), self._inputs, self.shape
        tail_slot, tail_len = inputs.tail_slot[layer, :rows], inputs.tail_len[:rows]
        append_tokens(
            k,
            v,
            tail_len,
            Pool(self.resident.k[layer], self.resident.v[layer], tail_slot),
            mirror=Pool(self.host.k[layer], self.host.v[layer], inputs.tail_page[:rows]),
        )
        query = q.contiguous()
        candidates = inputs.candidates.first(rows)
        if self.older is not None:
            slots = self._slot_of[layer], tail_slot, tail_len
            return self.older.attend(layer, query, self.resident, candidates, *slots)
        if self.is_dense:
            return self._attend_to_all(layer, query)
        if layer not in self._chosen:  # not computed ahead
            self._beside.join()  # the ring needs posts in single-stream order
            self._look_ahead(layer, query)
        self._beside.join(layer)
        query_ahead, selection = self._chosen.pop(layer)
        if self._posts_late:
            query_ahead = query
            self.transport.post(layer, query, selection.missing, selection.n_missing)
        pages, n_pages = selection.pages, None
        if not self.policy.rule.only_selected:
            pages, n_pages = candidates.table, candidates.n_full
        here = self._attend_here(layer, query, pages, n_pages)
        compares = self.boundary.step_log is not None and self.policy.query.attends
        if compares and query_ahead is not query:
            self._results.compare(layer, query, query_ahead, tail_len > 0)
        change = None
        if self._reweighs and query_ahead is not query:
            start_ns = self._clock.now()
            asked = query, query_ahead, *selection[1:]
            change = self.digests.mass_change(layer, *asked, shape.scale)
            self._clock.cut("attention", "mass", start_ns, layer=layer)
        out = self.transport.merge(layer, query, here, change)
        if self._verifier is not None:
            start_ns = self.tracer.now()
            parts = pages, self._slot_of[layer], selection.missing, self._results.running.batch
            self._verifier.check(layer, out, query, query_ahead, *parts, change)
            self.tracer.cut("attention", "verify", start_ns, layer=layer)
        return out

    def _attend_here(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, n_pages: torch.Tensor | None
    ) -> Attended:
        """Attention on the device, over those of ``pages`` that are resident and the page being filled."""
        rows, inputs, start_ns = len(query), self._inputs, self._clock.now()
        result = self._attend(
            query,
            self.resident.k[layer],
            self.resident.v[layer],
            pages,
            inputs.tail_slot[layer, :rows],
            inputs.tail_len[:rows],
            self.shape.scale,
            slot_of=self._slot_of[layer],
            n_pages=n_pages,
        )
        self._clock.cut("attention", "attend", start_ns, layer=layer)
        return result

    def _attend_to_all(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Full attention of a dense step; all its pages are resident."""
        candidates = self._inputs.candidates.first(len(query))
        out, _ = self._attend_here(layer, query, candidates.table, candidates.n_full)
        if self._verifier is not None:
            parts = candidates.table, self._slot_of[layer], candidates.list_table[:, :0]
            batch = self._results.running.batch
            self._verifier.check(layer, out, query, query, *parts, batch, None)
        return out.to(query.dtype)

    def close(self) -> None:
        """Wait for launched work, stop the copies and write the trace."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for part in (self.recall, self.older, self.boundary.step_log):
            if part is not None:
                part.close()
        self.tracer.write()
