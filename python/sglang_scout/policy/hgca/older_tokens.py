"""Tokens that have left the device's window, and which the CPU attends to (Deng et al., Algorithms 1 and 2).

The device attends to a request's recent window and, if the policy requires, to its first pages. Of a page that leaves
the window each KV head keeps the salient tokens, in the context cache: those with more than beta / window of its
attention, by a moving average. A joining request, to the paper an append, has older pages without averages: a thread
selects among their tokens by the queries of the prompt's last token, which the prefill server sends, or else by those
of the first step here (line 20 of Algorithm 1). Until it is done, the CPU attends to all.

    boundary t-1   a page leaves with step t: its averages up to step t-2 are read back
    boundary t     its salient tokens are added to the lists, and the CPU attends to them from step t on
    later          a request's evaluation has ended: its lists replace all its older pages

All of this happens at boundaries, so lists are fixed during a step.

As in Deng et al.: the window, first in, first out by pages; averages of weights normalised in it (Algorithm 1 line 9);
both thresholds, per head; contiguous lists; the CPU beside the device in the same layer; evaluation beside the steps.
Not as there:

- A_cpu is of the prompt's last token alone. The paper gives no reduction over the appended ones.
- The averages are two steps old. A page that leaves with a request's second step, before it has any, is evaluated with
  the older ones.
- Query heads that share a KV head share its tokens, by the largest weight among them.
- Line 12's sign is reversed. Retained averages are not renormalised: only the cap reads them again. Heads are not
  merged into tasks with padding: the attention process takes a KV head of a request each.
- The cap, if set: the paper has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine import Ids
from sglang_scout.engine.ahead import Ahead, Selector
from sglang_scout.engine.device import Fetching, Staging, upload
from sglang_scout.engine.requests import Batch, Request
from sglang_scout.engine.step_buffers import StepInputs
from sglang_scout.engine.stores import Parts
from sglang_scout.engine.transport import Transport
from sglang_scout.policy.hgca.kept_tokens import (
    ContextCache,
    Kept,
    decay_mass,
    select_salient,
)

Tokens = tuple[Ids, Ids, Ids, npt.NDArray[np.float32]]
"""Layers, heads, tokens and their salience, see :meth:`ContextCache.add`."""


@dataclass(eq=False)
class Older:
    """Of a request of the batch."""

    state: int  # row of the policy's stores
    begin: int  # pages before the window's start
    kept: Kept
    queries: Tensor  # [L, HQ, D] the prompt's, or those on the device that its first step writes
    whole: list[int]  # until it is evaluated, all older pages
    evaluation: Future[Kept] | None = None
    since: list[Tokens] = field(default_factory=list)  # kept of pages that left since it joined
    row: int | None = None  # of the device, if its lists are there as they are now
    posted: Ids | int = 0  # [L] pages in these, of all heads


class OlderTokens(Selector):
    """Tracks requests and posts their older tokens. ``parts`` have host pages with context pages."""

    def __init__(
        self, parts: Parts, config: OffloadConfig, transport: Transport, inputs: StepInputs
    ) -> None:
        self._config, self._transport, self._inputs = config, transport, inputs
        self._parts, self._shape, self._device = parts, (shape := parts.shape), parts.device
        self._sinks, self._recent = parts.policy.rule.sink_pages, parts.policy.rule.recent_pages
        layers, heads, rows = shape.num_layers, shape.num_kv_heads, parts.sizes.max_batch
        lists, max_pages = (layers, rows, heads), parts.sizes.max_pages
        self._beta = torch.tensor(config.hgca_beta).item()  # infinite if too large for float32
        self._cache = ContextCache(parts.host, max_pages, config.context_cap_tokens)
        places = layers, rows, self._recent + 1, heads, shape.page_size
        self._maw = torch.zeros(places, device=self._device)
        ids = torch.full((*lists, max_pages), -1, dtype=torch.int32, device=self._device)
        self._ids, self._counts = ids, torch.zeros_like(ids[..., 0])
        self._queries = torch.zeros(
            layers, rows, shape.num_q_heads, shape.head_dim, device=self._device
        )
        self._staging = Staging(4 * rows, self._device)
        self._older: dict[Request, Older] = {}
        self._free_states, self._rows = list(range(rows)), 0  # rows of the last step
        self._leaving: dict[Request, int] = {}  # pages that leave with this step, and
        self._averages = Fetching([torch.zeros(1, 0)])  # [L, n, H, S] of these
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scout-evaluate")
        self.pause()

    @property
    def context_pages(self) -> tuple[int, int]:
        return self._cache.used_pages, self._cache.num_pages

    def pause(self) -> None:
        """No row has a request until the next step begins."""
        self._staging.device.fill_(-1)
        self._counts.zero_()
        for older in self._older.values():
            older.row = None

    def begin(self, batch: Batch) -> Batch:
        """Step boundary: bring the lists up to date. Returns the batch with the pages that the device attends to."""
        self._cache.begin_step()
        self._forget(batch.requests)
        [found] = self._averages.wait()
        averages = dict(zip(self._leaving, np.moveaxis(found, 1, 0), strict=True))
        attended = np.full_like(batch.table, -1)
        words = self._staging.fill().reshape(4, -1)
        words[:] = -1
        rows = zip(batch.requests, batch.table, batch.n_full.tolist(), strict=True)
        for row, (request, pages, full) in enumerate(rows):
            begin = max(0, full - self._recent)
            sinks = min(self._sinks, begin)
            older = self._older.get(request)
            is_new = older is None
            if older is None:
                queries = self._queries[:, row] if request.queries is None else request.queries
                own = self._cache.empty(), queries, pages[sinks:begin].tolist()
                older = self._older[request] = Older(self._free_states.pop(), begin, *own)
            else:
                if older.begin < begin:
                    assert begin == older.begin + 1, "averages are of one page"
                    if older.begin >= sinks:
                        self._leave(older, int(pages[older.begin]), averages.get(request))
                    older.begin = begin
                self._advance(older)
            window = np.concatenate([pages[begin:full], pages[:sinks]])
            attended[row, : len(window)] = window
            words[:, row] = older.state, is_new, begin % (self._recent + 1), full - begin
            if older.row != row:
                self._send(row, older)
        count = len(batch.requests)
        if count < self._rows:
            self._counts[:, count : self._rows] = 0
        self._rows = count
        self._staging.send(words.size)
        self._ask_of_leaving(batch)
        posted = sum(older.posted for older in self._older.values())
        held = count * self._shape.num_kv_heads * self._recent
        self._parts.counters.count_step(0, np.asarray(posted), held, "cpu")
        return replace(batch, table=attended, n_full=(attended >= 0).sum(1).astype(np.int32))

    def _forget(self, batch: Sequence[Request]) -> None:
        """Drop requests that have left the batch, ended or retracted."""
        stay = set(batch)
        for request in [request for request in self._older if request not in stay]:
            older = self._older.pop(request)
            self._cache.release(older.kept)
            self._free_states.append(older.state)
            running = older.evaluation
            if running is not None and not running.cancel():
                running.add_done_callback(lambda done: self._cache.release(done.result()))

    def _advance(self, older: Older) -> None:
        """Start the evaluation of a request after its first step; when it has ended, its result replaces the lists of
        all older pages."""
        if older.whole and older.evaluation is None:
            sent, pages = Fetching([older.queries]), torch.tensor(older.whole)
            older.evaluation = self._thread.submit(self._select, sent, pages)
        elif older.evaluation is not None and older.evaluation.done():
            older.kept = older.evaluation.result()
            older.evaluation, older.whole, older.row = None, [], None
            for tokens in older.since:
                self._cache.add(older.kept, *tokens)
            older.since = []

    def _select(self, sent: Fetching, pages: Tensor) -> Kept:
        """On the thread, concurrent with steps: select among all tokens of ``pages`` by the ``sent`` queries."""
        [queries] = map(torch.from_numpy, sent.wait())
        kept = self._cache.empty()
        for layer, k in enumerate(self._parts.host.k):
            of_layer = queries[layer].float(), k, pages, self._beta, self._shape.scale
            heads, *tokens = (x.numpy() for x in select_salient(*of_layer))
            self._cache.add(kept, np.full_like(heads, layer), heads, *tokens)
        return kept

    def _leave(self, older: Older, page: int, averages: npt.NDArray[np.float32] | None) -> None:
        """``page`` has left the window with these ``averages`` ``[L, H, S]``; without any it is to be evaluated."""
        older.row = None
        if older.whole or averages is None:
            older.whole.append(page)
        if averages is None:
            assert older.evaluation is None, "it has begun without the page"
            return
        salience = averages * np.float32(self._config.budget_tokens)
        at = layers, heads, places = (salience > self._beta).nonzero()
        tokens = layers, heads, page * self._shape.page_size + places, salience[at]
        if older.whole:
            older.since.append(tokens)
        else:
            self._cache.add(older.kept, *tokens)

    def _ask_of_leaving(self, batch: Batch) -> None:
        """Request the averages of pages that leave with the next step. A request's first step has none yet."""
        full, tail_len, requests = batch.n_full, batch.tail_len, batch.requests
        is_last = tail_len == self._shape.page_size
        rows = np.flatnonzero(is_last & (full >= self._recent) & (batch.ages > 0))
        states = [self._older[requests[row]].state for row in rows]
        places = (full[rows] - self._recent) % (self._recent + 1)
        self._leaving, found = {requests[row]: i for i, row in enumerate(rows)}, torch.zeros(1, 0)
        if len(rows):
            asked = [upload(np.array(x, np.int64), self._device) for x in (states, places)]
            found = self._maw[:, asked[0], asked[1]]
        self._averages = Fetching([found])

    def _send(self, row: int, older: Older) -> None:
        """Update the device's row with a request's lists."""
        ids, counts = self._cache.worker_ids(older.kept)
        if older.whole:
            pages = np.array(older.whole, np.int32)
            ids, counts = np.tile(pages, (*counts.shape, 1)), np.full_like(counts, len(pages))
        self._ids[:, row, :, : ids.shape[2]] = upload(np.ascontiguousarray(ids), self._device)
        self._counts[:, row] = upload(counts, self._device)
        older.row, older.posted = row, counts.sum(1)

    def take(self, layer: int, query: Tensor) -> Ahead:
        """The window, and the older tokens: ``[B * H, R]`` ids (:meth:`ContextCache.worker_ids`)."""
        rows = len(query)
        self._queries[layer, :rows] = query
        ids, counts = (x[layer, :rows].flatten(0, 1) for x in (self._ids, self._counts))
        window = self._inputs.candidates.first(rows)
        ticket = self._transport.post(layer, query, ids, counts)
        return Ahead(query, window.table, window.n_full, ids, counts, ticket)

    def attended(
        self, layer: int, query: Tensor, lse: Tensor, k: Tensor, pages: Tensor, *slots: Tensor
    ) -> None:
        """The device attended to a window of a layer; arguments as of :func:`decay_mass`, without those known here."""
        state, fresh, first_at, recent = self._staging.device.view(4, -1)[:, : len(query)]
        window = query, lse, k, pages, recent, *slots, first_at, state, fresh
        decay_mass(*window, self._maw[layer], self._config.hgca_alpha, self._shape.scale)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
