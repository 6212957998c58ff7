"""SparDA (arXiv 2606.04511): a trained forecast selects, the real query attends.

Each KV head selects pages one layer ahead by their mean keys, with the output of its own trained projection. Selected
pages are prefetched, and attention covers only these. The forecast is not an attention query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_scout.engine.ahead import QueryProjector
from sglang_scout.engine.policy import Policy, QuerySource
from sglang_scout.policy import Context, selection_rule, trained_weights
from sglang_scout.policy.learned import Means
from sglang_scout.policy.residency import ImportantPages

DEFAULTS: dict[str, Any] = {
    "digest": Means.name,
    "grain": "head",
    "forecast_file": None,
    "precompute": False,  # a forecast cannot attend
}


@dataclass(frozen=True)
class SparDA(Policy):
    """With one vector per KV head in place of a layer's predicted query."""

    def projectors(self, own: Sequence[QueryProjector]) -> list[QueryProjector]:
        """From the input of the previous layer after that layer's own norm; of layer 0 from its own (section 4.1)."""
        assert self.rule.weights is not None
        made, weights = [], self.rule.weights.arrays["w"]
        for layer, before in enumerate([own[0], *own[:-1]]):
            heads, w = own[layer].heads, torch.from_numpy(weights[layer]).to(before.norm_weight)
            heads = replace(heads, num_heads=len(w) // heads.head_dim, norm_weight=None)
            norm = before.norm_weight, before.norm_eps
            made.append(QueryProjector(*norm, heads, w, weight_bytes=w.nbytes))
        return made


def make(context: Context) -> Policy:
    config = context.config
    weights = trained_weights(config, "forecast")
    return SparDA(
        name="sparda",
        rule=selection_rule(config, Means, weights=weights),
        query=QuerySource(attends=False),
        route="fetch",
        residency=ImportantPages((1,) * context.num_layers),
    )
