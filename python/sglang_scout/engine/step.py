"""One decode step of GPU-CPU co-attention (paper Algorithm 1; sections 3.2 to 3.4).

Per layer l: at its input the query of layer l+1 is predicted and its important pages chosen; those
that are not resident go to the CPU worker at once. The attention of layer l covers its resident pages
and the page being filled; it is merged with the worker's answer, asked for one layer earlier.

What the host decides (residency, page tables) is fixed at the step boundary, in ``boundary.py``; within
the step nothing changes what it attends to. A recall may take a slot of its own layer once that layer's
attention is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.boundary import Batch, LastStep, StepBoundary
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.cpu_part import CpuPart, MissingCompute
from sglang_scout.engine.forecast import Forecast, LayerInputs, QueryProjector
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape, ResidentCache
from sglang_scout.engine.quality import QualityRecorder
from sglang_scout.engine.ranks import Ranks, SharedChoice
from sglang_scout.engine.recall import Copies, Recall
from sglang_scout.engine.step_log import StepLog
from sglang_scout.engine.trace import Tracer
from sglang_scout.engine.verify import Verifier
from sglang_scout.ops.append import Pool, append_tokens
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.layers import resident_slots
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.axes import Policy


@dataclass
class _Ahead:
    """A layer's selection, made before its attention."""

    query: torch.Tensor
    pages: torch.Tensor  # [B, k] selected, -1 padded
    missing: npt.NDArray[np.int32]  # [B, k] selected pages that were not resident, -1 padded
    on_cpu: npt.NDArray[np.int32]  # [B, k] those of them that are left to the worker
    copies: Copies | None  # of the others, where the policy copies ahead
    ticket: Any


class StepEngine:
    """Runs decode steps for one rank.

    Args:
        shape: sizes of the model on this rank.
        policy: the four choices.
        budget_pages: k, pages selected per request and layer.
        max_batch: most rows in a step.
        host, digests, resident, table: the stores and their books.
        projectors: per layer, how its query is predicted from a layer input.
        missing: who computes what is not resident.
        verify: compare every layer's output with a plain fp32 reference over the host pages, and
            the selections of the ranks with each other.
        ranks: those among which a layer's heads are dealt out; None: all are here.

    Attributes:
        step_log: gets a line for each step, if there is one.
        quality: measures predictors beside the one that serves, if there is one.
        inputs: what they predict from.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        policy: Policy,
        budget_pages: int,
        max_batch: int,
        host: HostPages,
        digests: DigestPool,
        resident: ResidentCache,
        table: ResidencyTable,
        projectors: Sequence[QueryProjector],
        missing: MissingCompute,
        tracer: Tracer | None = None,
        verify: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if digests.form != policy.digest.form:
            raise ValueError(
                f"the digests are {digests.form}, the policy scores {policy.digest.form}"
            )
        forced = policy.digest.sink_pages + policy.digest.recent_pages
        if table.num_slots < min(max_batch * (forced + 1), table.num_pages):
            raise ValueError(
                f"resident cache of {table.num_slots} slots cannot hold the sink, recent and tail "
                f"pages of {max_batch} requests ({forced + 1} each)"
            )
        self.shape = shape
        self.policy = policy
        self.budget_pages = budget_pages
        self.max_batch = max_batch
        self.host = host
        self.digests = digests
        self.resident = resident
        self.table = table
        self.counters = Counters(shape.num_layers)
        self.tracer = tracer or Tracer(None, 0)
        self.recall = Recall(host, resident, table, self.counters, shape.page_bytes, self.tracer)
        self.boundary = StepBoundary(
            shape, policy, budget_pages, host, digests, table, self.recall, self.counters
        )
        self.step_log: StepLog | None = None
        self.quality: QualityRecorder | None = None
        self.inputs = LayerInputs()
        self._forecast = Forecast(policy.predictor, projectors, self.inputs)
        self._cpu_part = CpuPart(missing, shape, max_batch, self.counters, self.tracer)
        self.ranks = ranks
        self._shared = None if ranks is None else SharedChoice(ranks, policy.digest)
        self._verifier = Verifier(host, shape, self.counters) if verify else None
        self._step = 0
        self._ahead: dict[int, _Ahead] = {}
        self._predicted: dict[int, torch.Tensor] = {}  # by layer; used when the real ones are there
        self._batch: Batch | None = None
        self._now = LastStep.none(shape.num_layers)  # what this step misses
        self._step_us = 0.0  # smoothed
        self._step_start_ns = 0
        self._slot_of = torch.from_numpy(table.slot_of)
        self._open_layer = -1  # that runs now; for the timeline
        self._layer_start_ns = 0

    def begin_step(
        self,
        page_table: npt.NDArray[np.int32],
        request_slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
    ) -> None:
        """Step boundary; see :class:`StepBoundary`.

        Args:
            page_table: ``[B, N]`` host page ids; entries past a request's last page are ignored.
            request_slots: ``[B]`` row of each request in SGLang's request table.
            seq_lens: ``[B]`` length including the token that this step writes.
        """
        if len(page_table) > self.max_batch:
            raise ValueError(
                f"batch of {len(page_table)} rows; buffers were made for {self.max_batch}"
            )
        self._step += 1
        self.counters.steps += 1
        self.tracer.step(self._step)
        start_ns = self.tracer.now()
        self._ahead.clear()
        self._predicted.clear()
        self._step_start_ns = time.monotonic_ns()
        self._batch = self.boundary.begin(
            self._step, page_table, request_slots, seq_lens, self._now, self._step_us
        )
        missed = np.zeros((self.shape.num_layers, len(page_table)), np.int64)
        self._now = LastStep(self._batch.ages, missed)
        if self._follows_inputs:
            self.inputs.begin_step(request_slots, self._batch.fresh)
        if self.step_log is not None:
            batch = self._batch
            self.step_log.begin(self._step, self._step_start_ns, batch.ages, batch.n_full.numpy())
        self.tracer.cut("boundary", "step boundary", start_ns, requests=len(page_table))

    def layer_input(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Before layer ``layer``: predict and post for the layers that the policy names.

        Args:
            x: ``[B, hidden]`` input of the layer before its norm (residual stream).
            positions: ``[B]`` int64.
        """
        self.layer_output()
        self._open_layer, self._layer_start_ns = layer, self.tracer.now()
        if self._follows_inputs:
            self.inputs.see(layer, x)
        if self.quality is not None:
            self.quality.layer_input(layer, x, positions)
        predictor = self.policy.predictor
        young = self._current().ages < predictor.exact_steps
        if young.all():
            return
        for target in predictor.targets(layer, self.shape.num_layers):
            start_ns = self.tracer.now()
            query = self._forecast.query(layer, target, x, positions)
            self.tracer.cut("ahead", "predict", start_ns, layer=target)
            # With a young request in the batch, all of the layer waits for its real query.
            if young.any():
                self._predicted[target] = query
            else:
                self._look_ahead(target, query)

    def layer_output(self) -> None:
        """The layer whose input came last has ended; the next layer's input says so too."""
        if self._open_layer >= 0:
            self.tracer.cut("device", "layer", self._layer_start_ns, layer=self._open_layer)
            self._open_layer = -1

    def _look_ahead(self, layer: int, query: torch.Tensor) -> _Ahead:
        """Choose the pages of ``layer`` for ``query`` and post the missing ones (Algorithm 1, 4-7)."""
        batch = self._current()
        digest = self.policy.digest
        start_ns = self.tracer.now()
        scores = self.digests.score(
            layer, query, batch.table, batch.n_full, self.shape.scale, digest.head_reduce
        )
        if digest.resident_bonus:
            # Of what no head looks for, any page is as good as another: take what is here.
            scores += digest.resident_bonus * (
                resident_slots(self._slot_of[layer], batch.table) >= 0
            )
        if self._shared is not None:
            # After the bonus: what is resident here need not be on the other ranks.
            scores = self._shared.scores(scores)
        start_ns = self.tracer.cut("ahead", "score", start_ns, layer=layer)
        selection = select_pages(
            scores,
            batch.table,
            batch.n_full,
            self._slot_of[layer],
            self.budget_pages,
            digest.sink_pages,
            digest.recent_pages,
        )
        if self._shared is not None and self._verifier is not None:
            is_same = self._shared.is_same(selection.pages)
            self.counters.verify_unequal_selections += not is_same
        pages, missing = selection.pages.numpy(), selection.missing.numpy()
        self.table.uses.touch(np.array([layer]), pages[None], self._step, batch.fresh)
        copies, on_cpu = None, missing
        if self.policy.missing.copy_ahead and (missing >= 0).any():
            copies = self.recall.start(layer, missing)
            on_cpu = _pack_left(np.where(copies.slots_of(missing) < 0, missing, -1))
        counts = (on_cpu >= 0).sum(axis=1, dtype=np.int32)
        self._now.missed[layer] = (missing >= 0).sum(axis=1)
        self.counters.count_selection(
            layer, int((pages >= 0).sum()), int(counts.sum()), len(pages) * self.budget_pages
        )
        if self.step_log is not None:
            self.step_log.layer(layer, counts)
        self.tracer.cut("ahead", "select", start_ns, layer=layer)
        ticket = self._cpu_part.post(layer, self._step, query, on_cpu, counts)
        ahead = _Ahead(query, selection.pages, missing, on_cpu, copies, ticket)
        self._ahead[layer] = ahead
        return ahead

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer: append, attend on the device, merge the worker's part, recall.

        Args:
            q: ``[B, HQ, D]`` real query after RoPE.
            k, v: ``[B, H, D]`` of the new token.
        Returns:
            ``[B, HQ, D]`` fp32.
        """
        batch = self._current()
        append_tokens(
            k,
            v,
            batch.tail_len,
            Pool(self.resident.k[layer], self.resident.v[layer], batch.tail_slot[layer]),
            mirror=Pool(self.host.k[layer], self.host.v[layer], batch.tail_page),
        )
        query = q.float()
        ahead = self._ahead.pop(layer, None) or self._look_ahead(layer, self._late(layer, query))
        assert batch.slots is not None
        slots = batch.slots[layer]
        if self.policy.digest.only_selected:
            slots = resident_slots(self._slot_of[layer], ahead.pages)
        if ahead.copies is not None:
            slots = self._with_copies(layer, slots, ahead)
        start_ns = self.tracer.now()
        out, lse = attend_pages(
            query.contiguous(),
            self.resident.k[layer],
            self.resident.v[layer],
            slots,
            batch.tail_slot[layer],
            batch.tail_len,
            self.shape.scale,
            self.shape.logit_cap,
        )
        self.tracer.cut("attention", "attend", start_ns, layer=layer)
        if ahead.ticket is not None:
            out, lse = self._cpu_part.merge(layer, ahead.ticket, out, lse)
        if self.quality is not None:
            self.quality.attention(layer, self._step, query, batch)
        if self._verifier is not None:
            start_ns = self.tracer.now()
            self._verifier.check(
                layer, out, query, ahead.query, self._on_device(layer, ahead), ahead.on_cpu, batch
            )
            self.tracer.cut("attention", "verify", start_ns, layer=layer)
        self._recall_missing(layer, ahead)
        if layer == self.shape.num_layers - 1:
            end_ns = time.monotonic_ns()
            took_us = (end_ns - self._step_start_ns) / 1e3
            self._step_us += (took_us - self._step_us) * (1 / 8 if self._step_us else 1.0)
            if self.step_log is not None:
                self.step_log.end(end_ns)
        return out

    def _late(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """``[B, HQ, D]`` what a layer without lead chooses with: the real query, but for requests whose
        query was predicted. So a request's tokens do not depend on when others join."""
        predicted = self._predicted.pop(layer, None)
        if predicted is None:
            return query.contiguous()
        young = self._current().ages < self.policy.predictor.exact_steps
        return torch.where(torch.from_numpy(young)[:, None, None], query, predicted)

    def _with_copies(self, layer: int, slots: torch.Tensor, ahead: _Ahead) -> torch.Tensor:
        """Wait for the pages that were copied ahead, and attend to them as well."""
        assert ahead.copies is not None
        start_ns = time.monotonic_ns()
        ahead.copies.done.result()
        end_ns = time.monotonic_ns()
        self.counters.count_wait(layer, (end_ns - start_ns) // 1000)
        self.tracer.add("attention", "wait", start_ns, end_ns, layer=layer, copies=True)
        return torch.cat([slots, torch.from_numpy(ahead.copies.slots_of(ahead.missing))], dim=1)

    def _recall_missing(self, layer: int, ahead: _Ahead) -> None:
        """After its attention, a layer recalls of what it missed the pages that the policy picks."""
        if ahead.ticket is None:
            return
        layers, pages = self.policy.residency.pick(
            np.array([layer]), ahead.on_cpu[None], self._current().ages, self.table.uses
        )
        if len(pages):
            self.recall.swap(layers, pages, self._step)

    def _on_device(self, layer: int, ahead: _Ahead) -> npt.NDArray[np.int32]:
        """``[B, any]`` full pages that the device attended to, -1 in between."""
        batch = self._current()
        assert batch.slots is not None
        pages, slots = batch.table, batch.slots[layer]
        if self.policy.digest.only_selected:
            pages, slots = ahead.pages, resident_slots(self._slot_of[layer], ahead.pages)
        on_device = np.where(slots.numpy() >= 0, pages.numpy(), -1)
        if ahead.copies is not None:
            copied = np.where(ahead.copies.slots_of(ahead.missing) >= 0, ahead.missing, -1)
            on_device = np.concatenate([on_device, copied], axis=1)
        return on_device

    @property
    def _follows_inputs(self) -> bool:
        return self._forecast.needs_previous or self.quality is not None

    def _current(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("no step has begun: begin_step must run before a layer does")
        return self._batch

    def close(self) -> None:
        """Stop the copy thread and write the trace."""
        self.recall.close()
        self.tracer.write()
        if self.step_log is not None:
            self.step_log.close()
        if self.quality is not None:
            self.quality.close()


def _pack_left(pages: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Move each row's -1 entries behind the others, keeping order."""
    order = np.argsort(pages < 0, axis=1, kind="stable")
    return np.ascontiguousarray(np.take_along_axis(pages, order, axis=1))
