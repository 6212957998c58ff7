"""ScoutAttention: missing pages are computed on the CPU a layer ahead, and recalled asynchronously.

Each layer recalls at its own interval, from a profile (paper section 3.4), or when its CPU compute ratio is predicted
to exceed the threshold β.
"""

from __future__ import annotations

from typing import Any

from sglang_scout.core.config import DEFAULT_RECALL_THRESHOLD, PAPER_BUDGET_TOKENS
from sglang_scout.engine.policy import Policy, QuerySource, Residency
from sglang_scout.policy import Context, selection_rule
from sglang_scout.policy.residency import ImportantPages, RecallController

DEFAULTS: dict[str, Any] = {
    "paper": {
        "digest": "minmax",
        "budget_tokens": PAPER_BUDGET_TOKENS,
        "reweigh": False,
        "recall": "fixed",
        "recall_threshold": DEFAULT_RECALL_THRESHOLD,
    },
    "page_checksums": False,
}


def make(context: Context) -> Policy:
    config = context.config
    query = QuerySource(config.precompute, config.exact_layers)
    return Policy(
        name="scout",
        rule=selection_rule(config),
        query=query,
        route="cpu",
        residency=_residency(context, query),
    )


def _residency(context: Context, query: QuerySource) -> Residency:
    config, profile, layers = context.config, context.profile, context.num_layers
    intervals = profile.intervals if profile else [config.recall_interval] * layers
    if config.recall == "off":
        return ImportantPages((0,) * layers)
    if config.recall == "fixed":
        return ImportantPages(intervals)
    threshold = config.recall_threshold
    if threshold is None:
        threshold = profile.threshold if profile else DEFAULT_RECALL_THRESHOLD
    # Layers not computed ahead, if others are: the device waits for each of their pages on the CPU.
    ahead = {target for layer in range(layers) for target in query.targets(layer, layers)} - {0}
    return RecallController(
        intervals=intervals,
        threshold=threshold,
        step_pages=context.step_pages,
        eager_layers=[layer for layer in range(layers) if ahead and layer not in ahead],
    )
