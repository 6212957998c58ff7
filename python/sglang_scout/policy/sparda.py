"""SparDA (arXiv 2606.04511): a trained forecast selects, the real query attends.

Each KV head selects pages one layer ahead by their mean keys, with the output of its own trained projection. Selected
pages are prefetched, and attention covers only these. The forecast is not an attention query.
"""

from __future__ import annotations

from typing import Any

from sglang_scout.policy.base import Context, Policy, QuerySource, SelectionRule, trained_file
from sglang_scout.policy.residency import ImportantPages

DEFAULTS: dict[str, Any] = {
    "digest": "mean16",
    "grain": "head",
    "forecast_file": None,
    "precompute": False,  # a forecast cannot attend
}


def make(context: Context) -> Policy:
    trained_file(context.config, "forecast_file")
    return Policy(
        name="sparda",
        rule=SelectionRule.of(context.config),
        query=QuerySource(attends=False),
        route="fetch",
        residency=ImportantPages((1,) * context.num_layers),
    )
