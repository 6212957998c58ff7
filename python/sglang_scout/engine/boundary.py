"""The step boundary: everything that the host decides about a step before it begins.

    1  results     what step t-2 selected is read back: counters, page uses (``step_buffers.py``)
    2  recalls     finished copies are mapped (``recall.py``)
    3  digests     pages that the last step filled get theirs (``pages.py``)
    4  placement   sink, newest and tail pages, and first pages of arriving requests (``pages.py``, ``requests.py``)
    5  plan        the policy decides this step's recalls of what step t-2 missed; they start
    6  inputs      page table, lengths and residency changes are sent to the device (``step_buffers.py``)

What the step attends to then stays fixed until the next boundary.
"""

from __future__ import annotations

import time

import numpy as np

from sglang_scout.core.profile import Step, StepLog
from sglang_scout.engine import Ids, PageIds
from sglang_scout.engine.ahead import Selector
from sglang_scout.engine.pages import Pages
from sglang_scout.engine.policy import StepReport
from sglang_scout.engine.recall import Recall
from sglang_scout.engine.requests import Batch, Requests
from sglang_scout.engine.step_buffers import LaunchedStep, StepResults
from sglang_scout.engine.stores import Parts


class StepBoundary:
    """Prepares each step."""

    def __init__(
        self,
        parts: Parts,
        recall: Recall,
        pages: Pages,
        requests: Requests,
        results: StepResults,
        selector: Selector,
        step_log: StepLog | None,
    ) -> None:
        self._policy, self._table, self._counters = parts.policy, parts.table, parts.counters
        self._sizes, self._page_size = parts.sizes, parts.shape.page_size
        self._recall, self._pages, self._requests, self._results = recall, pages, requests, results
        self._selector, self._step_log = selector, step_log
        self._logged_recalls = np.zeros(3, np.int64)
        self._end_ns = 0  # of the last step whose results have arrived
        layers = parts.table.num_layers
        self._started = np.zeros(layers, np.int64)  # pages whose recall the last boundary started
        none = np.zeros((layers, 0), np.int64)
        # Of the last step whose selections are known.
        self._last: dict[str, Ids] = {"ages": none[0], "missed": none, "absent": none}
        parts.table.pin_share = parts.policy.residency.pin_share

    def begin(self, step: int, page_table: PageIds, request_slots: Ids, seq_lens: Ids) -> Batch:
        """Prepare step number ``step``, ascending. Other arguments as of :meth:`StepEngine.begin_step`."""
        start_ns = time.monotonic_ns()
        self._results.send_for()
        known = self._take_in()
        residency = self._policy.residency
        landed, used = self._recall.judge_landed(step)
        self._recall.commit(step, residency.patience_us)
        full = (seq_lens - 1) // self._page_size
        tail_len = (seq_lens - 1) % self._page_size + 1
        table = page_table.astype(np.int32)
        for row, end in enumerate((full + 1).tolist()):
            table[row, end:] = -1
        tail_page = table[np.arange(len(table)), full]
        requests = self._requests.of_rows(request_slots.tolist(), step)
        ages = step - np.array([request.first_step for request in requests], np.int64)
        new, joining = [np.zeros(0, np.int32)], []
        for request, pages, count in zip(requests, table, full.tolist(), strict=True):
            new.append(pages[request.full_pages : count])
            request.full_pages = count
            if request.first_step == step:
                joining.append(self._requests.needed(request, pages[:count]))
        self._pages.begin(step, np.concatenate(new), tail_page)
        ends = np.array([request.end_tokens for request in requests], np.int64)
        self._table.held_back = residency.reserve(seq_lens, np.maximum(ends - seq_lens, 0))
        joining = [pages for pages in joining if pages.size]
        self._pages.load_forced(table, full, tail_page, tail_len, joining)
        self._requests.start_copies()
        residency.plan(
            StepReport(
                step=step,
                budget_pages=self._sizes.budget_pages * self._sizes.lists,
                **self._last,
                started=self._started,
                landed=landed,
                used=used,
                late_pages=self._recall.late_pages,
                spare_slots=self._table.num_spare,
            )
        )
        self._pages.fill_free_slots(table, full)
        self._recall_missing(known)
        batch = Batch(
            requests=requests,
            table=table,
            n_full=full.astype(np.int32),
            tail_slot=np.take(self._table.slot_of, tail_page, axis=1),
            tail_len=tail_len.astype(np.int32),
            tail_page=tail_page,
            ages=ages,
            is_dense=self._is_dense(table, full),
        )
        batch = self._selector.begin(batch)
        self._results.launch(step, start_ns, batch)
        return batch

    def _take_in(self) -> LaunchedStep | None:
        """Record the selections of the oldest step whose results have arrived. Returns them without pages that have
        changed owner since; missing: those that still are."""
        done = self._results.take()
        if done is None:
            return None
        batch, uses = done.batch, self._table.uses
        missed = uses.count(done.missing)
        selected = int(uses.count(done.pages).sum())  # a plain int, for JSON
        if batch.is_dense:  # all selected: none is more important than another
            selected = self._table.num_layers * int(batch.n_full.sum())
        budget = len(batch.ages) * self._sizes.budget_pages * self._sizes.lists
        self._counters.dense_steps += batch.is_dense
        if not batch.is_dense:
            self._counters.query_cosine_by_layer = done.cosine.copy()
        of_step = selected, missed.sum(axis=1), budget, self._policy.route
        self._counters.count_step(*of_step, done.waited_ns // 1000)
        done.pages, missing = self._pages.still_held(done.step, done.pages, done.missing)
        done.missing = self._table.still_missing(missing)  # some have been recalled since
        self._last = {"ages": batch.ages, "missed": missed, "absent": uses.count(done.missing)}
        uses.touch(np.arange(self._table.num_layers), done.pages, done.step, batch.ages == 0)
        # A boundary may come while the step before still runs.
        took_ns = done.end_ns - max(done.start_ns, self._end_ns)
        self._end_ns = done.end_ns
        self._counters.observe(
            step_seconds=took_ns / 1e9,
            boundary_seconds=(done.begun_ns - done.start_ns) / 1e9,
            gpu_wait_seconds=int(done.waited_ns.sum()) / 1e9,
        )
        if self._step_log is not None:
            self._step_log.write(self._line(done, missed))
        return done

    def _line(self, done: LaunchedStep, missed: Ids) -> Step:
        """Of the step log; recalls are those since the last one."""
        counters = self._counters
        totals = counters.recalled_pages, counters.recall_bytes, counters.recall_wait_us
        recalls = np.array(totals, np.int64)
        pages, nbytes, wait_us = (recalls - self._logged_recalls).tolist()
        self._logged_recalls = recalls
        return Step(
            step=done.step,
            start_us=done.start_ns // 1000,
            step_us=(done.end_ns - done.start_ns) // 1000,
            ages=done.batch.ages.tolist(),
            full_pages=done.batch.n_full.tolist(),
            cpu_pages=missed.tolist(),
            gpu_wait_us=(done.waited_ns // 1000).tolist(),
            recalled_pages=pages,
            recall_bytes=nbytes,
            recall_wait_us=wait_us,
            query_cosine=done.cosine.astype(float).round(4).tolist(),  # NaN becomes null
        )

    def _recall_missing(self, done: LaunchedStep | None) -> None:
        """Each layer recalls those of its missed pages that the policy picks."""
        self._started = np.zeros_like(self._started)
        if done is not None:
            pick = self._policy.residency.pick
            layers, pages = pick(done.missing, done.batch.ages, self._table.uses)
            if len(pages):
                # Running steps may still read the slots that this takes; copies wait for these steps.
                self._started = self._recall.start_recall(layers, pages, done.step)

    def _is_dense(self, table: PageIds, full: Ids) -> bool:
        """Whether all pages are resident and so few that selecting among them would read more."""
        dense_pages = self._selector.dense_pages
        beyond = np.maximum(full - self._sizes.budget_pages, 0).sum()
        if dense_pages is None or beyond > dense_pages:
            return False
        return self._table.are_resident(table[np.arange(table.shape[1]) < full[:, None]])
