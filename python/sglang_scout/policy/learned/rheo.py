"""RheoServe: each KV head selects by low-rank page embeddings; pages with long-term importance stay on the device.

The CPU attends to selected pages that are not resident, with the real query, concurrently with the device, which
attends to all that are. What the description of RheoServe has and this has not:

    heads          go to the CPU as a whole if most of their data are there: its steps 5 and 6 contradict that
    residency      by head; here a page is resident for all heads as soon as one of them needs it
    recorder (10)  accumulates scores; here selections, and they count half after ``half_life_steps``, so that pages of
                   new requests can compete with those of old ones, whose slots these share
    budget         room for all expected growth is reserved; here for that until a layer's next exchange
    batches (2)    wait for enough requests, in slots of their own; here SGLang's
    pilot cache    blocks of 64 tokens, updated with each token (8); here pages of 32, when they are full
    promotion      in idle cycles; here in each step, of what was missed

It gives no rank, period, shares, order of layers or half-life: these are ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints
from sglang_scout.engine.policy import Policy, QuerySource, StepReport
from sglang_scout.ops.residency import PageUses
from sglang_scout.policy import Context, selection_rule, trained_weights
from sglang_scout.policy.learned import Pilots
from sglang_scout.policy.residency import ImportantPages

DEFAULTS: dict[str, Any] = {
    "digest": Pilots.name,
    "grain": "head",
    "precompute": False,
    "pilot_file": None,
}


def make(context: Context) -> Policy:
    config, weights = context.config, None
    if config.digest == Pilots.name:
        weights = trained_weights(config, "pilot")
    return Policy(
        name="rheo",
        rule=selection_rule(config, Pilots, weights=weights, only_selected=False),
        query=QuerySource(config.precompute, config.exact_layers),
        route="cpu",
        residency=HistoryAware(context.num_layers, config.page_size_tokens, context.step_pages),
    )


class HistoryAware(ImportantPages):
    """Pages with long-term importance stay: decides by accumulated scores alone, so that runs are deterministic.

    item              here
    recorder (10)     the slowly decaying frequency of pages (``ops/residency.py``), one per list that selects them
    exchange (11)     each layer every ``period`` steps, the hottest missing pages that it selected since the last one
                      against the least important ones
    pinning           the most frequent share of a layer's pages is evicted only by pages that must be resident
    promotion         in the steps between, as many missed pages as find a spare slot
    warm-up (2)       a new request's newest pages, as many as the budget
    budget controller ``reserve``
    """

    pin_share = 0.25
    half_life_steps = 1024.0

    def __init__(self, num_layers: int, page_size: int, spare_pages: int, period: int = 16) -> None:
        super().__init__((period,) * num_layers, grace_steps=0)
        self.page_size, self.spare_pages, self.period = page_size, spare_pages, period

    def plan(self, report: StepReport) -> None:
        super().plan(report)
        self._exchanging = np.flatnonzero(self.is_due)
        self._since = report.step - RESULT_DELAY_STEPS - self.period + 1
        self.is_due, self.granted = ~self.is_due, report.spare_slots

    def pick(self, missed: Ints, ages: Ids, uses: PageUses) -> tuple[Ids, Ids]:
        # All selected since the layer's last exchange: hot pages need not be those the last step missed.
        hot = uses.selected_since(self._exchanging, self._since)
        likely = super().pick(missed, ages, uses)
        return np.concatenate([hot[0], likely[0]]), np.concatenate([hot[1], likely[1]])

    def loaded_pages(self, full: int, budget_pages: int) -> int:
        return min(full, budget_pages)

    def reserve(self, lengths: Ids, max_new: Ids) -> int:
        """Pages that will be opened until a layer's next exchange, which makes room for later ones.

        ``max_new`` alone, by default the rest of the context, would reserve more slots than exist.
        """
        ends = lengths + np.minimum(max_new, self.period)
        return int(((ends - 1) // self.page_size - (lengths - 1) // self.page_size).sum())

    def describe(self) -> dict[str, Any]:
        return {"period": self.period, "pin_share": self.pin_share}
