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
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.boundary import StepBoundary
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.device import ForkedStream, upload
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.older_tokens import OlderTokens
from sglang_scout.engine.pages import Pages
from sglang_scout.engine.parts import Parts
from sglang_scout.engine.recall import Recall
from sglang_scout.engine.requests import Requests
from sglang_scout.engine.step_inputs import StepInputs, of_lists
from sglang_scout.engine.step_results import StepResults
from sglang_scout.engine.stores import HostPages, ModelShape, Ranks, ResidentCache, Sizes
from sglang_scout.engine.trace import DeviceClock, Tracer
from sglang_scout.engine.transport import Fetch, GraphTransport, HostTransport, Transport
from sglang_scout.engine.verify import Verifier
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.pages import Pool, append_tokens
from sglang_scout.ops.predict import QueryProjector
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.ops.select import Selection, select_pages
from sglang_scout.policy.base import Policy
from sglang_scout.worker.client import WorkerClient


class StepEngine:
    """Runs decode steps for one rank.

    Args:
        shape: sizes of the model on this rank.
        host: pages that the attention process maps too; the device can access them.
        projectors: per layer, computes its query from a layer input.
        worker: computes missing pages, called from the host or from the device's stream.
        digests: of the host pages; None: created here.
        ranks: those that share a layer's heads; None: all heads are here.

    Attributes:
        resident, table: the resident cache and its table.
        is_dense: of the current step, or the one being captured; ``has_dense_steps``: whether any may be.
        requests, pages: track requests and owners of pages.
    Raises:
        ValueError: sizes that do not fit the policy.
    """

    def __init__(
        self,
        config: OffloadConfig,
        policy: Policy,
        shape: ModelShape,
        sizes: Sizes,
        host: HostPages,
        projectors: Sequence[QueryProjector],
        worker: WorkerClient | GraphTransport,
        *,
        device: torch.device | str = "cpu",
        digests: DigestPool | None = None,
        tracer: Tracer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        rule = policy.rule
        forced = min(rule.sink_pages + rule.recent_pages, sizes.max_pages - 1)
        if sizes.num_slots < min(sizes.max_batch * (forced + 1), host.num_pages):
            raise ValueError(
                f"resident cache of {sizes.num_slots} slots cannot hold the sink, recent and tail "
                f"pages of {sizes.max_batch} requests ({forced + 1} each)"
            )
        self.resident = ResidentCache(shape, sizes.num_slots, device)
        self._device = device = self.resident.k.device  # with its index
        self.digests = digests = digests or DigestPool(shape, host.num_pages, device, rule.kind)
        if digests.kind != rule.kind:
            raise ValueError(f"the digests are {digests.kind}, the policy scores {rule.kind}")
        if policy.feedback is not None:
            sizes = replace(sizes, budget_pages=0, lists=1)  # nothing is selected
        self.policy, self.shape, self.sizes, self.host = policy, shape, sizes, host
        self.tracer = tracer = tracer or Tracer(None, 0)
        self.counters = Counters(shape.num_layers)
        self.table = table = ResidencyTable(shape.num_layers, host.num_pages, sizes.num_slots)
        stores = host, digests, self.resident, table
        parts = Parts(policy, shape, sizes, *stores, self.counters, tracer)
        self.transport = transport = self._transport_to(worker, parts)
        # Ranks may differ in residency, and would then replay different graphs.
        self.has_dense_steps, self.is_dense = ranks is None and policy.feedback is None, False
        # With a list per KV head each selects for itself, even if a rank has only one.
        self._ranks = ranks = ranks if config.grain == "layer" else None
        self.recall = Recall(parts)
        self.pages = Pages(parts, self.recall)
        self.requests = Requests(self.pages)
        stamps, self._clock = transport.stamps, transport.stamps or tracer
        self._inputs = StepInputs(shape.num_layers, sizes, device)
        self._results = StepResults(shape.num_layers, sizes, transport.waited_ns, device, stamps)
        # A verified layer synchronizes with the host, so no step can be captured.
        self._verifier = Verifier(parts, ranks) if config.verify else None
        self.older = None
        if policy.feedback is not None:
            self.older = OlderTokens(parts, policy.feedback, transport)
        dense_pages = None
        if self.has_dense_steps:
            predicts = policy.query.targets(0, 2)
            ahead_bytes = max((p.weight_bytes for p in projectors), default=0) if predicts else 0
            dense_pages = ahead_bytes // (2 * shape.page_bytes)
        follows = self.recall, self.pages, self.requests, self._results, self.older
        self.boundary = StepBoundary(parts, *follows, dense_pages)
        table.take_changes()
        self._slot_of = upload(table.slot_of, device).clone()
        self._beside = ForkedStream(None if ranks else device)  # collectives need order
        self._projectors, self._step = projectors, 0
        self._in_layer = ExitStack()  # a slice of the timeline
        on_cpu = policy.route == "cpu"
        self._reweighs = rule.reweigh and on_cpu and digests.mass_change is not None
        self._posts_late = on_cpu and not policy.query.attends
        self._chosen: dict[int, tuple[torch.Tensor, Selection]] = {}  # layer: query, selection
        # Capture runs the layers; kernels of boundaries would otherwise be compiled in the first request.
        digests.compile_kernels(host, self.resident.as_layers())
        self.recall.compile_kernels()

    def _transport_to(self, worker: WorkerClient | GraphTransport, parts: Parts) -> Transport:
        if self.policy.route == "fetch":
            return Fetch(parts)
        if not isinstance(worker, GraphTransport):
            return HostTransport(parts, worker)
        if self.tracer.active:  # the host only launches; the timeline needs device timestamps
            worker.stamps = DeviceClock(self.tracer, self.shape.num_layers, self._device)
        return worker

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
        self._step += 1
        self.counters.steps += 1
        self.tracer.step(self._step)
        with self.tracer.slice("boundary", "step boundary", requests=rows):
            batch = self.boundary.begin(self._step, page_table, request_slots, seq_lens)
            self.is_dense = batch.is_dense
            self._check_faults()
            changed, slots = self._inputs.send(batch, *self.table.take_changes())
            if len(changed):
                self._slot_of.view(-1).index_copy_(0, changed, slots)
            self.transport.begin_step(self._step)
            self._beside.join()
            self._chosen.clear()

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
        self._in_layer.enter_context(self._clock.slice("device", "layer", layer=layer))
        if self.is_dense:
            return
        for target in self.policy.query.targets(layer, self.shape.num_layers):
            projector = self._projectors[target]
            read = projector.start(x, residual)
            with self._beside.fork(target, read, positions):
                with self._clock.slice("ahead", "predict", layer=target):
                    query = projector.finish(read, positions)
                self._look_ahead(target, query)

    def layer_output(self) -> None:
        """The current layer has ended; implied by the next layer's input."""
        self._in_layer.close()

    def _look_ahead(self, layer: int, query: torch.Tensor) -> None:
        """Select the pages of ``layer`` and post the missing ones (Algorithm 1, lines 4 to 7)."""
        rule, candidates = self.policy.rule, self._inputs.candidates.first(len(query))
        by_list = of_lists(query, self.sizes.lists)
        with self._clock.slice("ahead", "score", layer=layer):
            scores = self.digests.score(layer, by_list, candidates, self.shape.scale)
            if self._ranks is not None:
                # Softmax shares are per head over its pages, so they can be summed over any heads.
                scores = self._ranks.combine(scores, "sum")
        with self._clock.slice("ahead", "select", layer=layer):
            tables = candidates.list_table, candidates.list_n_full, self._slot_of[layer]
            forced = rule.sink_pages, rule.recent_pages
            out = self._results.of(layer, len(by_list))
            chosen = self.sizes.budget_pages, *forced, rule.mass, out
            selection = select_pages(scores, *tables, *chosen)
        if self._verifier is not None:
            self._verifier.check_selection(selection.pages)
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
        query, candidates = q.contiguous(), inputs.candidates.first(rows)
        pages, n_pages, query_ahead, change = candidates.table, candidates.n_full, query, None
        if self.older is not None:
            missing = self.older.post(layer, query)
        elif self.is_dense:
            missing = candidates.list_table[:, :0], candidates.list_n_full
        else:
            query_ahead, selection = self._selected(layer, query)
            missing = selection.missing, selection.n_missing
            if self.policy.rule.only_selected:
                pages, n_pages = selection.pages, None
        slot_of = self._slot_of[layer]
        parts = self.resident.k[layer], self.resident.v[layer], pages, tail_slot, tail_len
        with self._clock.slice("attention", "attend", layer=layer):
            here = attend_pages(query, *parts, shape.scale, slot_of=slot_of, n_pages=n_pages)
        if self.older is not None:
            window = parts[0], pages, slot_of, tail_slot, tail_len
            self.older.attended(layer, query, here[1], *window)
        if query_ahead is not query:
            if self.boundary.step_log is not None:
                self._results.compare(layer, query, query_ahead, tail_len > 0)
            if self._reweighs:
                with self._clock.slice("attention", "mass", layer=layer):
                    both = query, query_ahead
                    change = self.digests.mass_change(layer, *both, *missing, shape.scale)
        if self.is_dense:
            out = here[0].to(query.dtype)
        else:
            out = self.transport.merge(layer, query, here, change)
        if self._verifier is not None:
            parts = pages, slot_of, *missing, self._results.running.batch, change
            with self.tracer.slice("attention", "verify", layer=layer):
                self._verifier.check(layer, out, query, query_ahead, *parts)
        return out

    def _selected(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, Selection]:
        """What was selected for a layer, ahead or now, and posted; and the query that attends to its missing pages."""
        if layer not in self._chosen:  # not computed ahead
            self._beside.join()  # the ring needs posts in single-stream order
            self._look_ahead(layer, query)
        self._beside.join(layer)
        query_ahead, selection = self._chosen.pop(layer)
        if self.policy.query.attends:
            return query_ahead, selection
        if self._posts_late:
            self.transport.post(layer, query, selection.missing, selection.n_missing)
        return query, selection

    def close(self) -> None:
        """Wait for launched work, stop the copies and write the trace."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for part in (self.recall, self.older, self.boundary.step_log):
            if part is not None:
                part.close()
        self.tracer.write()
