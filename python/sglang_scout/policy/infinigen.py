"""Recall-based offload, the paper's baseline: every missing page is copied to the device, none is computed.

Pages are chosen a layer ahead and fetched before their layer needs them (InfiniGen). What was fetched is recalled
as well, so that pages that stay important stay on the device.
"""

from __future__ import annotations

from sglang_scout.policy.base import Context, Digest, Policy, query_source
from sglang_scout.policy.residency import ImportantPages


def make(context: Context) -> Policy:
    return Policy(
        name="infinigen",
        digest=Digest.of(context.config),
        query=query_source(context.config),
        route="fetch",
        residency=ImportantPages((1,) * context.num_layers),
    )
