"""RheoServe: each KV head selects by low-rank page embeddings; pages with long-term importance stay on the device.

The CPU attends to selected pages that are not resident, with the real query, concurrently with the device, which
attends to all that are. Among other points, three differ from its description: heads whose data are mostly on the CPU
are not offloaded as a whole, as its steps 5 and 6 contradict that; the recorder counts selections, not scores; and room
is reserved for growth until a layer's next exchange, not for all that ``max_new_tokens`` allows.
"""

from __future__ import annotations

from typing import Any

from sglang_scout.policy.base import Context, Policy, QuerySource, SelectionRule, trained_file
from sglang_scout.policy.history import HistoryAware

DEFAULTS: dict[str, Any] = {
    "digest": "pilot",
    "grain": "head",
    "head_reduce": "max",
    "precompute": False,
    "pilot_file": None,
}


def make(context: Context) -> Policy:
    config = context.config
    if config.digest == DEFAULTS["digest"]:
        trained_file(config, "pilot_file")
    return Policy(
        name="rheo",
        rule=SelectionRule.of(config, only_selected=False),
        query=QuerySource.of(config),
        route="cpu",
        residency=HistoryAware(
            page_size=config.page_size_tokens,
            step_pages=max(1, int(config.recall_step_mib * 2**20) // context.page_bytes),
        ),
    )
