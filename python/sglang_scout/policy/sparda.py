"""SparDA (arXiv 2606.04511): a trained forecast chooses, the real query attends.

Each KV head chooses pages one layer ahead by their mean keys, with a vector that a projection of its own was trained
to make. What it chose is prefetched, and attention covers that alone. The forecast is no attention query.
"""

from __future__ import annotations

from typing import Any

from sglang_scout.policy.base import Context, Digest, NextLayerQuery, Policy, trained_file
from sglang_scout.policy.residency import ImportantPages

DEFAULTS: dict[str, Any] = {
    "digest": "mean16", "grain": "head", "head_reduce": "max", "forecast_file": None,
    "precompute": False,  # a forecast attends to nothing
}  # fmt: skip


def make(context: Context) -> Policy:
    trained_file(context.config, "forecast_file")
    return Policy(
        name="sparda",
        digest=Digest.of(context.config),
        query=NextLayerQuery(attends=False),
        route="fetch",
        residency=ImportantPages((1,) * context.num_layers),
    )
