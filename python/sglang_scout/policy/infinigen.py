"""Recall-based offload, the paper's baseline: every missing page is copied to the device, none is computed.

Pages are selected a layer ahead and prefetched for their layer (InfiniGen). Fetched pages are also recalled, so that
pages that stay important become resident.
"""

from __future__ import annotations

from sglang_scout.engine.policy import Policy, QuerySource
from sglang_scout.policy import Context, selection_rule
from sglang_scout.policy.residency import ImportantPages


def make(context: Context) -> Policy:
    config = context.config
    return Policy(
        name="infinigen",
        rule=selection_rule(config),
        query=QuerySource(config.precompute, config.exact_layers),
        route="fetch",
        residency=ImportantPages((1,) * context.num_layers),
    )
