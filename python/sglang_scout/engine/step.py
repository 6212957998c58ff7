"""One decode step of GPU-CPU co-attention (paper Algorithm 1; sections 3.2 to 3.4).

Per layer l: at its input the query of layer l+1 is predicted and its important pages chosen; those
that are not resident go to the CPU worker at once. The attention of layer l covers its resident pages
and the page being filled; it is merged with the worker's answer, asked for one layer earlier.

What the host decides (residency, page tables) is fixed in :meth:`StepEngine.begin_step`; within the
step nothing changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.pages import ResidencyTable
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape, ResidentCache
from sglang_scout.engine.recall import Copies, Recall
from sglang_scout.engine.trace import Tracer
from sglang_scout.engine.verify import relative_error
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.merge import merge_states
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.select import select_pages
from sglang_scout.policy.axes import Policy

QueryProjector = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer input ``[B, hidden]``, positions ``[B]``) -> query after RoPE, ``[B, HQ, D]`` fp32."""


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


@dataclass
class _Ahead:
    """A layer's selection, made before its attention."""

    query: torch.Tensor
    missing: npt.NDArray[np.int32]  # [B, k] selected pages that were not resident, -1 padded
    on_cpu: npt.NDArray[np.int32]  # [B, k] those of them that are left to the worker
    copies: Copies | None  # of the others, where the policy copies ahead
    ticket: Any
    posted_ns: int


@dataclass
class _Batch:
    """What begin_step fixed for the step; N = pages of the longest request."""

    table: torch.Tensor  # [B, N] int32 host page ids, -1 beyond the last page
    n_full: torch.Tensor  # [B] int32 full pages, candidates for selection
    slots: torch.Tensor  # [L, B, N] int32 resident slots of full pages, -1 elsewhere
    tail_slot: torch.Tensor  # [L, B] int32 slot of the page being filled
    tail_len: torch.Tensor  # [B] int32 valid tokens in it, this step's included
    tail_page: npt.NDArray[np.int64]  # [B]
    fresh: npt.NDArray[np.bool_]  # [B] requests in their first step here


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
        verify: compare every layer's output with a plain fp32 reference over the host pages.
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
    ) -> None:
        forced = policy.digest.sink_pages + policy.digest.recent_pages
        if table.num_slots < max_batch * (forced + 1):
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
        self._projectors = projectors
        self._missing = missing
        self._verify = verify
        self._step = 0
        self._fresh_requests: set[int] = set()
        self._ahead: dict[int, _Ahead] = {}
        self._batch: _Batch | None = None
        self._last_missing = np.zeros(shape.num_layers, np.int64)
        self._slot_of = torch.from_numpy(table.slot_of)
        answer = (shape.num_layers, max_batch, shape.num_q_heads)
        self._cpu_out = np.zeros((*answer, shape.head_dim), np.float32)
        self._cpu_lse = np.full(answer, -np.inf, np.float32)
        self._layer_start_ns = 0

    # Life of requests and pages -----------------------------------------------------------------

    def admit(self, request_slots: Iterable[int]) -> None:
        """Requests join the batch, new or after a retraction; ``request_slots`` are their table rows."""
        self._fresh_requests.update(int(r) for r in request_slots)

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages were handed to a request that is about to receive them."""
        self.digests.poison(pages)

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages went back to the allocator: nothing that is known about them holds any more."""
        self.digests.invalidate(pages)
        self.table.invalidate(pages)

    def clear(self) -> None:
        """All pages were freed (cache flush)."""
        self.free_pages(np.arange(self.host.num_pages))

    # The step -----------------------------------------------------------------------------------

    def begin_step(
        self,
        page_table: npt.NDArray[np.int32],
        request_slots: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
    ) -> None:
        """Step boundary: commit recalls, complete digests, load forced pages, fix the page tables.

        Args:
            page_table: ``[B, N]`` host page ids; entries past a request's last page are ignored.
            request_slots: ``[B]`` row of each request in SGLang's request table.
            seq_lens: ``[B]`` length including the token that this step writes.
        """
        rows, columns = page_table.shape
        if rows > self.max_batch:
            raise ValueError(f"batch of {rows} rows; buffers were made for {self.max_batch}")
        self._step += 1
        self.counters.steps += 1
        self.tracer.step()
        self._ahead.clear()
        self.recall.commit(self._step)

        size = self.shape.page_size
        last = (seq_lens - 1) // size
        tail_len = (seq_lens - 1) % size + 1
        column = np.arange(columns)
        table = np.where(column <= last[:, None], page_table, -1).astype(np.int32)
        is_full = column < last[:, None]
        tail_page = table[np.arange(rows), last].astype(np.int64)
        fresh = np.array([int(r) in self._fresh_requests for r in request_slots], bool)
        self._fresh_requests.difference_update(int(r) for r in request_slots)

        self._complete_digests(table[is_full])
        self._load_forced(table, last, tail_page, fresh)
        self._make_room(fresh)

        # np.take, unlike fancy indexing, returns rows that are contiguous, as the kernels want them.
        slots = np.take(self.table.slot_of, table, axis=1)
        slots[:, ~is_full] = -1
        self._batch = _Batch(
            table=torch.from_numpy(table),
            n_full=torch.from_numpy(last.astype(np.int32)),
            slots=torch.from_numpy(slots),
            tail_slot=torch.from_numpy(np.take(self.table.slot_of, tail_page, axis=1)),
            tail_len=torch.from_numpy(tail_len.astype(np.int32)),
            tail_page=tail_page,
            fresh=fresh,
        )

    def _complete_digests(self, pages: npt.NDArray[np.int32]) -> None:
        """Every full page needs a digest: taken from the prefill server, else computed here."""
        pending = np.unique(pages[~self.digests.valid[pages]]).astype(np.int64)
        if len(pending):
            self.digests.build(self.digests.accept(pending), self.host.k)

    def _load_forced(
        self,
        table: npt.NDArray[np.int32],
        last: npt.NDArray[np.int64],
        tail_page: npt.NDArray[np.int64],
        fresh: npt.NDArray[np.bool_],
    ) -> None:
        """Sink, newest and tail pages of every request are resident; fresh requests that fit, whole."""
        digest = self.policy.digest
        column = np.arange(table.shape[1])
        forced = (column < digest.sink_pages) | (column >= last[:, None] - digest.recent_pages)
        forced = np.concatenate([table[forced & (column < last[:, None])], tail_page])
        self.table.touch_all_layers(forced, self._step)
        warm = [
            table[row, self.policy.residency.warm_columns(int(last[row]), self.budget_pages)]
            for row in np.flatnonzero(fresh)
        ]
        wanted = np.concatenate([forced, *warm])
        if (self.table.slot_of[:, wanted] >= 0).all():
            return
        for layer in range(self.shape.num_layers):
            # Forced pages may push out anything else, warm ones only what was not just in use.
            for pages, before in ((forced, self._step), (wanted, self._step - 1)):
                absent = self.table.missing(layer, pages)
                self.table.evict(layer, len(absent), before)
                loaded = self.recall.load_now(layer, absent, self._step)
                self.counters.warmed_pages += loaded
        if (self.table.slot_of[:, forced] < 0).any():
            raise RuntimeError("no slot for a page that must be resident; the slot count is wrong")

    def _make_room(self, fresh: npt.NDArray[np.bool_]) -> None:
        """Free slots for the recalls that this step will start, from pages not of use lately."""
        first = int(fresh.sum()) * self.budget_pages if self.policy.residency.recall_fresh() else 0
        copy_ahead = self.policy.missing.copy_ahead
        for layer in range(self.shape.num_layers):
            want = first
            if copy_ahead or self.policy.residency.due(layer, self._step):
                want = max(want, int(self._last_missing[layer]) + first)
            if want:
                self.table.evict(layer, want, self._step - 1)

    def layer_input(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Before layer ``layer``: predict and post for the layers that the policy names.

        Args:
            x: ``[B, hidden]`` input of the layer before its norm (residual stream).
            positions: ``[B]`` int64.
        """
        if self.tracer.active:
            now = time.monotonic_ns()
            if layer > 0:
                self.tracer.add("device", f"layer {layer - 1}", self._layer_start_ns, now)
            self._layer_start_ns = now
        for target in self.policy.predictor.targets(layer, self.shape.num_layers):
            self._look_ahead(target, self._projectors[target](x, positions))

    def _look_ahead(self, layer: int, query: torch.Tensor) -> _Ahead:
        """Choose the pages of ``layer`` for ``query`` and post the missing ones (Algorithm 1, 4-7)."""
        batch = self._current()
        digest = self.policy.digest
        scores = score_pages(
            query,
            self.digests.kmin[layer],
            self.digests.kmax[layer],
            batch.table,
            batch.n_full,
            self.shape.scale,
            digest.head_reduce,
        )
        selection = select_pages(
            scores,
            batch.table,
            batch.n_full,
            self._slot_of[layer],
            self.budget_pages,
            digest.sink_pages,
            digest.recent_pages,
        )
        pages, missing = selection.pages.numpy(), selection.missing.numpy()
        self.table.touch(layer, pages, self._step)
        copies, on_cpu = None, missing
        if self.policy.missing.copy_ahead and (missing >= 0).any():
            copies = self.recall.start(layer, missing)
            on_cpu = _pack_left(np.where(copies.slots_of(missing) < 0, missing, -1))
        counts = (on_cpu >= 0).sum(axis=1, dtype=np.int32)
        self._last_missing[layer] = (missing >= 0).sum()
        self.counters.count_selection(
            layer, int((pages >= 0).sum()), int(counts.sum()), len(pages) * self.budget_pages
        )
        ticket = None
        if counts.any():
            ticket = self._missing.post(layer, self._step, query.numpy(), on_cpu, counts)
        ahead = _Ahead(query, missing, on_cpu, copies, ticket, time.monotonic_ns())
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
        self._append(layer, k, v)
        query = q.float()
        ahead = self._ahead.pop(layer, None) or self._look_ahead(layer, query.contiguous())
        slots = batch.slots[layer]
        if ahead.copies is not None:
            slots = self._with_copies(slots, ahead)
        with self.tracer.slice("attention", f"attend {layer}"):
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
        if ahead.ticket is not None:
            out, lse = self._merge_answer(layer, ahead, out, lse)
        if self._verify:
            self._check_output(layer, out, query, ahead)
        self._recall_missing(layer, ahead)
        if layer == self.shape.num_layers - 1 and self.tracer.active:
            self.tracer.add("device", f"layer {layer}", self._layer_start_ns, time.monotonic_ns())
        return out

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The new token's K and V go to the host page and to the tail's slot."""
        batch = self._current()
        offset = (batch.tail_len - 1).long()
        page = torch.from_numpy(batch.tail_page)
        slot = batch.tail_slot[layer].long()
        dtype = self.shape.dtype
        for new, host, device in (
            (k, self.host.k[layer], self.resident.k[layer]),
            (v, self.host.v[layer], self.resident.v[layer]),
        ):
            new = new.to(dtype)
            host[page, offset] = new
            device[slot, offset] = new

    def _merge_answer(
        self, layer: int, ahead: _Ahead, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = out.shape[0]
        cpu_out, cpu_lse = self._cpu_out[layer, :rows], self._cpu_lse[layer, :rows]
        start_ns = time.monotonic_ns()
        reply = self._missing.wait(ahead.ticket, cpu_out, cpu_lse)
        end_ns = time.monotonic_ns()
        self.tracer.add("attention", f"wait {layer}", start_ns, end_ns)
        self.tracer.add("worker", f"layer {layer}", ahead.posted_ns, end_ns)
        self.counters.gpu_wait_us += (end_ns - start_ns) // 1000
        self.counters.fallback_pages += reply.fallback_pages
        return merge_states(out, lse, torch.from_numpy(cpu_out), torch.from_numpy(cpu_lse))

    def _with_copies(self, slots: torch.Tensor, ahead: _Ahead) -> torch.Tensor:
        """Wait for the pages that were copied ahead, and attend to them as well."""
        assert ahead.copies is not None
        start_ns = time.monotonic_ns()
        ahead.copies.done.result()
        self.counters.gpu_wait_us += (time.monotonic_ns() - start_ns) // 1000
        return torch.cat([slots, torch.from_numpy(ahead.copies.slots_of(ahead.missing))], dim=1)

    def _recall_missing(self, layer: int, ahead: _Ahead) -> None:
        """After its attention, a layer whose turn it is recalls what it missed."""
        if ahead.ticket is None:
            return
        if self.policy.residency.due(layer, self._step):
            self.recall.start(layer, ahead.on_cpu)
        elif self.policy.residency.recall_fresh() and self._current().fresh.any():
            self.recall.start(layer, ahead.on_cpu[self._current().fresh])

    def _check_output(
        self, layer: int, out: torch.Tensor, query: torch.Tensor, ahead: _Ahead
    ) -> None:
        """Compare with the plain reference, and keep the largest deviation."""
        batch = self._current()
        table = batch.table.numpy()
        on_device = np.where(batch.slots[layer].numpy() >= 0, table, -1)
        if ahead.copies is not None:
            copied = np.where(ahead.copies.slots_of(ahead.missing) >= 0, ahead.missing, -1)
            on_device = np.concatenate([on_device, copied], axis=1)
        error = relative_error(
            out,
            query,
            ahead.query,
            on_device,
            ahead.on_cpu,
            batch.tail_page,
            batch.tail_len.numpy(),
            self.host.k[layer],
            self.host.v[layer],
            self.shape.scale,
            self.shape.logit_cap,
        )
        self.counters.verify_checks += 1
        self.counters.verify_max_rel_error = max(self.counters.verify_max_rel_error, error)

    def _current(self) -> _Batch:
        if self._batch is None:
            raise RuntimeError("no step has begun: begin_step must run before a layer does")
        return self._batch

    def close(self) -> None:
        """Stop the copy thread and write the trace."""
        self.recall.close()
        self.tracer.write()


def _pack_left(pages: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Move each row's -1 entries behind the others, keeping order."""
    order = np.argsort(pages < 0, axis=1, kind="stable")
    return np.ascontiguousarray(np.take_along_axis(pages, order, axis=1))
