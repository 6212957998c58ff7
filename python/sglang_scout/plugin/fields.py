"""The server flags as fields of SGLang's ``ServerArgs``."""

from __future__ import annotations

from typing import Any

from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS, KEYS
from sglang_scout.policy.base import policies

# Type, default and help.
FIELDS: dict[str, tuple[Any, Any, str]] = {
    "kv_offload": (
        str,
        "none",
        "GPU-CPU co-attention decoding: KV pages live in host memory, the GPU keeps page digests and the important "
        "pages, a CPU attention process computes the rest. Give it to both servers of a prefill-decode pair. Policies: "
        "none, " + ", ".join(policies()),
    ),
    "kv_offload_budget": (
        int | None,
        None,
        "Tokens that a request attends to in full pages, per layer and step; a multiple of 32. "
        f"Default {DEFAULT_BUDGET_TOKENS}, unless the policy has its own.",
    ),
    "kv_offload_host_gb": (
        float | None,
        None,
        "Host memory for KV pages, in GiB, over all ranks. Default: half of the memory that is available when the "
        "server starts, limited to the pages whose digests fit on the GPU in addition to resident pages.",
    ),
    "kv_offload_recall_profile": (
        str | None,
        None,
        "JSON file with per-layer recall intervals, from `sglang-scout profile`.",
    ),
    "kv_offload_cpus": (
        str | None,
        None,
        "CPUs that compute attention, for example 0-35; if all belong to one NUMA node, KV pages are allocated on "
        "it. With --tp-size they are divided among the ranks. Default: those near the GPU, else every CPU "
        "of this process.",
    ),
    "kv_offload_config": (
        str | None,
        None,
        "Further settings as a JSON object, or @FILE: "
        f"{', '.join(name for name, key in KEYS.items() if key.is_public)}; see docs/reference/configuration.md.",
    ),
}
