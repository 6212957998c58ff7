"""Which pages a device cache holds while one request decodes, as RheoServe's policy moves them in one layer.

The parts are the servers' own (ops/residency.py, policy/learned/rheo.py), in the order of engine/boundary.py; every
copy ends within its step. A server's requests share one cache. Page n of the text has the id n + 1, as 0 is padding.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints
from sglang_scout.engine.policy import StepReport
from sglang_scout.ops.residency import Reservation, ResidencyTable

ONE = np.zeros(1, np.int64)  # the layer, the request


class Residents:
    """The cache of ``layer``, whose exchanges are staggered, for ``cache_pages`` and the page that is being filled."""

    def __init__(
        self, layer: int, page_tokens: int, text_pages: int, cache_pages: int, budget_pages: int
    ) -> None:
        from sglang_scout.policy.learned.rheo import HistoryAware  # a policy may be removed

        self._policy = HistoryAware(1, page_tokens, spare_pages=0)
        half_life = self._policy.half_life_steps
        self._table = ResidencyTable(1, text_pages + 2, cache_pages + 1, half_life)
        self._table.pin_share = self._policy.pin_share
        self._page_tokens, self._budget_pages = page_tokens, budget_pages
        self._first = self._step = layer + 1
        self._results: deque[tuple[int, Ints, Ints]] = deque()  # step, selected, of them missing
        self._copies: Reservation | None = None

    def follow(self, chosen: Tensor, at: Tensor) -> Tensor:
        """[w, N] full pages that are resident in the steps of tokens ``at`` [w], which select ``chosen`` [H, w, N]."""
        held = np.zeros(chosen.shape[1:], bool)
        for row, position in enumerate(at.tolist()):
            held[row] = self._one(chosen[:, row].numpy(), position)
        return torch.from_numpy(held)

    def _one(self, chosen: np.ndarray, position: int) -> np.ndarray:
        table, step = self._table, self._step
        full = position // self._page_tokens
        done = self._results.popleft() if len(self._results) == RESULT_DELAY_STEPS else None
        if done is not None:
            is_new = np.array([done[0] == self._first])
            table.uses.touch(ONE, done[1], done[0], is_new)
        if self._copies is not None:
            table.commit(self._copies, step - 1)
            self._copies = None
        table.held_back = self._policy.reserve(ONE + position + 1, ONE + self._policy.period)
        forced = np.array([1, full, full + 1])  # sink, newest and the one being filled
        table.touch_all_layers(forced, step)
        self._load(forced, step)
        if step == self._first:
            count = self._policy.loaded_pages(full, self._budget_pages)
            self._load(np.arange(full - count + 1, full + 1), step - 1, is_forced=False)
        if done is not None:
            self._exchange(*done)
        slots = table.slot_of[0, 1 : chosen.shape[1] + 1]
        ids = np.nonzero(chosen)[1] + 1
        pages = ids.astype(np.int32)[None, None]
        missing = np.where(table.slot_of[0, pages] < 0, pages, np.int32(-1))
        self._results.append((step, pages, missing))
        self._step = step + 1
        return (slots >= 0) & (np.arange(len(slots)) < full)

    def _exchange(self, step: int, pages: Ints, missing: Ints) -> None:
        table, absent = self._table, self._table.still_missing(missing)
        ages: Ids = ONE + step - self._first
        none = np.zeros_like(ONE)
        missed, gone = table.uses.count(missing), table.uses.count(absent)
        spare = table.num_spare
        report = StepReport(
            step=self._step,
            budget_pages=self._budget_pages,
            ages=ages,
            missed=missed,
            absent=gone,
            started=none,
            landed=none,
            used=none,
            late_pages=0,
            spare_slots=spare,
        )
        self._policy.plan(report)
        picked = self._policy.pick(absent, ages, table.uses)
        self._copies = table.exchange(*picked, step)

    def _load(self, pages: Ids, before_step: int, is_forced: bool = True) -> None:
        """Before the step begins."""
        table = self._table
        absent = table.missing(0, pages) % table.num_pages
        room = len(absent) + (0 if is_forced else table.held_back)
        table.evict(ONE, ONE + room, before_step, is_forced)
        table.commit(table.reserve(ONE, absent, is_forced), self._step)
