"""The decode step on a CUDA device: what ``step.py`` does, with the host outside of it.

Between two boundaries nothing comes back to the host and nothing is decided there, so that all layers of
a step can be one CUDA graph. What the boundary fixed lies in buffers that stay where they are; what a
step selected is fetched while the next one runs, and the host acts on it two boundaries later:

    boundary t   takes in what step t-2 selected, maps the copies of boundary t-1, starts others
    step t       runs with what boundary t fixed; the host prepares t+1 meanwhile

So a recall that `step.py` starts in the step of the miss starts two boundaries later here. Which pages
move still depends on selections alone, never on how fast anything was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.boundary import Batch, LastStep, StepBoundary
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.device import SideStream, upload
from sglang_scout.engine.forecast import DeviceLayerInputs, Forecast, QueryProjector
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape, ResidentCache
from sglang_scout.engine.ranks import Ranks, SharedChoice
from sglang_scout.engine.recall import Recall
from sglang_scout.engine.step_inputs import StepInputs
from sglang_scout.engine.step_log import StepLog
from sglang_scout.engine.step_results import KNOWN_AFTER, LaunchedStep, StepResult, StepResults
from sglang_scout.engine.trace import Tracer
from sglang_scout.engine.verify import Verifier
from sglang_scout.ops.append import Pool, append_tokens
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.doorbell import DeviceRing
from sglang_scout.ops.layers import resident_slots
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.axes import Policy


class DeviceStepEngine:
    """Runs decode steps for one rank on a CUDA device.

    Args:
        shape, policy, budget_pages, max_batch, host, digests, resident, table, projectors, tracer: as
            of :class:`StepEngine`; digests and resident cache lie on the device, the host pages in
            memory that it can use.
        max_pages: N, most pages of a request.
        ring: to the worker.
        life: epoch that records of the next step go to; never 0.
        hidden_size, hidden_dtype: of the layers' inputs.
        ranks: as of :class:`StepEngine`; their calls are captured with the step.
        verify: as of :class:`StepEngine`; every layer then waits for the host, so no step can be captured.

    Attributes:
        step_log: as of :class:`StepEngine`.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        policy: Policy,
        budget_pages: int,
        max_batch: int,
        max_pages: int,
        host: HostPages,
        digests: DigestPool,
        resident: ResidentCache,
        table: ResidencyTable,
        projectors: Sequence[QueryProjector],
        ring: DeviceRing,
        life: Callable[[], int],
        hidden_size: int,
        hidden_dtype: torch.dtype,
        tracer: Tracer | None = None,
        verify: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if policy.missing.copy_ahead:
            raise ValueError(f"{policy.name}: copies within a step are not possible on this device")
        self.shape, self.policy, self.budget_pages = shape, policy, budget_pages
        self.max_batch, self.max_pages = max_batch, max_pages
        self.host, self.digests, self.resident, self.table = host, digests, resident, table
        self.counters = Counters(shape.num_layers)
        self.tracer = tracer or Tracer(None, 0)
        device = resident.k.device
        self._device = device
        side = SideStream(device) if device.type == "cuda" else None
        self.recall = Recall(
            host, resident, table, self.counters, shape.page_bytes, self.tracer, side,
            known_after=KNOWN_AFTER,
        )  # fmt: skip
        slots = resident.as_layers()
        self.boundary = StepBoundary(
            shape, policy, budget_pages, host, digests, table, self.recall, self.counters,
            slots_on_host=False, resident=slots, known_after=KNOWN_AFTER,
        )  # fmt: skip
        self.step_log: StepLog | None = None
        self._ring, self._life, self._epoch = ring, life, 0
        ring.errors()  # of another engine are none of this one's
        self._inputs = StepInputs(shape.num_layers, max_batch, max_pages, device)
        self._follows = DeviceLayerInputs(
            shape.num_layers, hidden_size, hidden_dtype, self._inputs.source
        )
        self._forecast = Forecast(policy.predictor, projectors, self._follows, device)
        table.take_changes()
        self._slot_of = upload(table.slot_of, device).clone()
        self._results = StepResults(
            shape.num_layers, max_batch, budget_pages, ring.waited_ns, device
        )
        self._last = LastStep.none(shape.num_layers)
        self._rows_of: dict[int, int] = {}  # request slot -> row, of the step before
        self._step = 0
        self._step_us = 0.0
        self._late = False
        self._shared = None if ranks is None else SharedChoice(ranks, policy.digest)
        self._verifier = Verifier(host, shape, self.counters) if verify else None
        self._chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: query, pages
        self._predicted: dict[int, torch.Tensor] = {}
        # Layers run when they are captured; what boundaries launch would be compiled in the first request.
        digests.rehearse(host, slots)
        self.recall.rehearse()

    @property
    def can_be_captured(self) -> bool:
        """Whether steps are the device's alone, so that a graph of one can be replayed."""
        return self._verifier is None

    @property
    def has_late_steps(self) -> bool:
        """Whether some steps take real queries, those of requests in their first steps here.

        They launch other things than steps that predict all queries, and need a graph of their own.
        """
        return self.policy.predictor.lead > 0 and self.policy.predictor.exact_steps > 0

    @property
    def is_late(self) -> bool:
        """Whether the step that was begun is such a one."""
        return self._late

    def begin_capture(self) -> None:
        """What is launched until the next step reaches no request: it is warm-up, or captured."""
        self._inputs.clear()
        self._ring.set_life(0)
        self._epoch = 0
        self._late = False

    @contextmanager
    def captured_late(self) -> Iterator[None]:
        """What is launched within is that of a late step."""
        self._late = True
        try:
            yield
        finally:
            self._late = False

    # Boundary ------------------------------------------------------------------------------------

    def begin_step(
        self,
        page_table: npt.NDArray[np.int32],
        request_slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
    ) -> None:
        """Step boundary; arguments as of :meth:`StepEngine.begin_step`."""
        rows, columns = page_table.shape
        if rows > self.max_batch or columns > self.max_pages:
            raise ValueError(
                f"batch of {rows} rows, {columns} pages; buffers were made for {self.max_batch} "
                f"and {self.max_pages}"
            )
        trace_ns, start_ns = self.tracer.now(), time.monotonic_ns()
        self._results.send_for()
        known = self._take_in()
        self._step += 1
        self.counters.steps += 1
        self.tracer.step(self._step)
        batch = self.boundary.begin(
            self._step, page_table, request_slots, seq_lens, self._last, self._step_us
        )
        if known is not None:
            self._recall_missing(known)
        young = batch.ages < self.policy.predictor.exact_steps
        self._late = bool(young.any()) and self.has_late_steps
        self._send(batch, young, request_slots)
        if (epoch := self._life()) != self._epoch:
            self._ring.set_life(epoch)
            self._epoch = epoch
        self._ring.begin_step(self._step)
        self._chosen.clear()
        self._predicted.clear()
        self._results.launch(self._step, start_ns, batch)
        self.tracer.cut("boundary", "step boundary", trace_ns, requests=rows)

    def _sources(
        self, request_slots: npt.NDArray[np.int64], fresh: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        slots = request_slots.tolist()
        source = np.array([self._rows_of.get(slot, -1) for slot in slots], np.int64)
        self._rows_of = {slot: row for row, slot in enumerate(slots)}
        return np.where(fresh, -1, source)

    def _send(
        self, batch: Batch, young: npt.NDArray[np.bool_], request_slots: npt.NDArray[np.int64]
    ) -> None:
        """Bring what the step reads up to date on the device: one transfer."""
        source = self._sources(request_slots, batch.fresh)
        changed, slots = self._inputs.send(batch, young, source, *self.table.take_changes())
        if len(changed):
            self._slot_of.view(-1).index_copy_(0, changed, slots)

    def _take_in(self) -> StepResult | None:
        """Books and counters of the oldest step whose results have come.

        Returns:
            Them, without pages that have changed hands since.
        """
        result = self._results.take()
        if result is None:
            return None
        self.check()
        launched, pages, missing = result.launched, result.pages, result.missing
        batch, step = launched.batch, launched.step
        rows, layers = len(batch.ages), self.shape.num_layers
        missed = self.table.uses.count(missing)
        self._last = LastStep(batch.ages, missed)
        selected = int(self.table.uses.count(pages).sum())  # a plain number: it becomes JSON
        self.counters.count_selections(selected, missed.sum(axis=1), rows * self.budget_pages)
        self.counters.count_waits(result.waited_ns // 1000)
        result.pages, result.missing = self.boundary.still_held(step, pages, missing)
        self.table.uses.touch(np.arange(layers), result.pages, step, batch.fresh)
        now_ns = time.monotonic_ns()
        took_us = (now_ns - launched.start_ns) / 1e3 / KNOWN_AFTER
        self._step_us += (took_us - self._step_us) * (1 / 8 if self._step_us else 1.0)
        if self.step_log is not None:
            self._write_log(launched, missed, now_ns)
        return result

    def _write_log(
        self, launched: LaunchedStep, missed: npt.NDArray[np.int64], now_ns: int
    ) -> None:
        assert self.step_log is not None
        batch = launched.batch
        self.step_log.begin(launched.step, launched.start_ns, batch.ages, batch.n_full.numpy())
        for layer, counts in enumerate(missed):
            self.step_log.layer(layer, counts)
        self.step_log.end(now_ns)

    def _recall_missing(self, result: StepResult) -> None:
        """Each layer recalls of what it missed the pages that the policy picks."""
        layers, pages = self.policy.residency.pick(
            np.arange(self.shape.num_layers),
            result.missing,
            result.launched.batch.ages,
            self.table.uses,
        )
        if len(pages):
            # The slots that this takes may be read by steps that run; copies wait for these.
            self.recall.swap(layers, pages, result.launched.step)

    def check(self) -> None:
        """Before a step's tokens are given out: none may lack a part of its attention.

        The step's results have come, so what its merges wrote to the host has too. A later step's fault
        ends this one as well: the server ends in any case.

        Raises:
            RuntimeError: no answer within the ring's timeout, or a refused record.
        """
        if faults := self._ring.faults():
            raise RuntimeError(
                f"--kv-offload: a decode step lacks a part of its attention: {', '.join(faults)}; its "
                "tokens are not given out"
            )

    # Step ----------------------------------------------------------------------------------------

    def layer_input(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Before layer ``layer``: predict and post for the layers that the policy names.

        Args:
            x: ``[B, hidden]`` input of the layer before its norm; B up to ``max_batch``.
            positions: ``[B]`` int64.
        """
        predictor = self.policy.predictor
        for target in predictor.targets(layer, self.shape.num_layers):
            query = self._forecast.query(layer, target, x, positions)
            if self._late:
                self._predicted[target] = query
            else:
                self._look_ahead(target, query)
        if self._forecast.needs_previous:
            self._follows.see(layer, x)

    def layer_output(self) -> None:
        """For the timeline of :class:`StepEngine`; a graph has none."""

    def _look_ahead(self, layer: int, query: torch.Tensor) -> None:
        """Choose the pages of ``layer`` and post the missing ones (Algorithm 1, lines 4 to 7)."""
        rows, digest = len(query), self.policy.digest
        table, n_full = self._inputs.table[:rows], self._inputs.n_full[:rows]
        scores = self.digests.score(
            layer, query, table, n_full, self.shape.scale, digest.head_reduce
        )
        if digest.resident_bonus:
            scores += digest.resident_bonus * (resident_slots(self._slot_of[layer], table) >= 0)
        if self._shared is not None:
            scores = self._shared.scores(scores)
        selection = select_pages(
            scores, table, n_full, self._slot_of[layer], self.budget_pages,
            digest.sink_pages, digest.recent_pages, out=self._results.of(layer, rows),
        )  # fmt: skip
        if self._shared is not None and self._verifier is not None:
            is_same = self._shared.is_same(selection.pages)
            self.counters.verify_unequal_selections += not is_same
        self._ring.post(layer, query.contiguous(), selection.missing, selection.n_missing)
        self._chosen[layer] = query, selection.pages

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer; see :meth:`StepEngine.attend`. B up to ``max_batch``."""
        rows = len(q)
        inputs, shape = self._inputs, self.shape
        tail_slot, tail_len = inputs.tail_slot[layer, :rows], inputs.tail_len[:rows]
        append_tokens(
            k, v, tail_len,
            Pool(self.resident.k[layer], self.resident.v[layer], tail_slot),
            mirror=Pool(self.host.k[layer], self.host.v[layer], inputs.tail_page[:rows]),
        )  # fmt: skip
        query = q.float().contiguous()
        if layer not in self._chosen:
            self._look_ahead(layer, self._late_query(layer, query))
        query_ahead, pages = self._chosen.pop(layer)
        n_pages = None
        if not self.policy.digest.only_selected:
            pages, n_pages = inputs.table[:rows], inputs.n_full[:rows]
        out, lse = attend_pages(
            query, self.resident.k[layer], self.resident.v[layer], pages,
            tail_slot, tail_len, shape.scale, shape.logit_cap, slot_of=self._slot_of[layer],
            n_pages=n_pages,
        )  # fmt: skip
        self._ring.merge(layer, out, lse)
        if self._verifier is not None:
            slots = resident_slots(self._slot_of[layer], pages)
            on_device = torch.where(slots >= 0, pages, -1).cpu().numpy()
            on_cpu = self._results.missing[layer, :rows].cpu().numpy()
            queries = query.cpu(), query_ahead.cpu()
            batch = self._results.running.batch
            self._verifier.check(layer, out.cpu(), *queries, on_device, on_cpu, batch)
        return out

    def _late_query(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """``[B, HQ, D]``: real for young requests and for layers without lead, else predicted."""
        predicted = self._predicted.pop(layer, None)
        if predicted is None:
            return query
        young = self._inputs.young[: len(query)] > 0
        return torch.where(young[:, None, None], query, predicted)

    def close(self) -> None:
        """Wait for what was launched, stop the copies and write the trace."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.recall.close()
        self.tracer.write()
        if self.step_log is not None:
            self.step_log.close()
