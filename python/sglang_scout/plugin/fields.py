"""The server flags as fields of SGLang's ``ServerArgs``."""

from __future__ import annotations

from typing import Any

from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS, KEYS
from sglang_scout.policy import policies

_OTHER_BUDGETS = "".join(
    f"; {keys['budget_tokens']} with `{name}`"
    for name, keys in policies().items()
    if "budget_tokens" in keys
)

# Type, default and help. The help ends with the default, as scripts/reference.py puts it into a column of its own.
FIELDS: dict[str, tuple[Any, Any, str]] = {
    "kv_offload": (
        str,
        "none",
        "Turns on GPU-CPU co-attention decoding. KV pages live in host memory, the GPU keeps a digest of every page "
        "and a cache of important pages, and a CPU attention process computes attention to selected pages that are "
        "missing there. Set it on both servers of a prefill-decode pair. Serve with `scout`; the other policies "
        "reproduce other systems for comparison, and `none` is stock SGLang. Policies: none, "
        f"{', '.join(policies())}. Default: none.",
    ),
    "kv_offload_budget": (
        int | None,
        None,
        "Tokens that a request attends to per layer and decode step, in full pages; a multiple of 32. A request "
        "whose context fits the budget gets exact attention while the device's cache holds its pages, a longer one an "
        "approximation. A larger budget is closer to full attention and takes more GPU memory, CPU time and copies. "
        f"Default: {DEFAULT_BUDGET_TOKENS}{_OTHER_BUDGETS}.",
    ),
    "kv_offload_host_gb": (
        float | None,
        None,
        "Host memory for KV pages in GiB, over all ranks; it limits how many tokens the decode server can hold. Set "
        "it to what `sglang-scout plan` prints, because the default depends on what else is running at the start. "
        "`--max-total-tokens` can only lower it. Default: half of the host memory that is available at the start, "
        "from the NUMA nodes of the attention threads; on a CUDA device at most the pages whose digests fit on the "
        "GPU beside the resident pages.",
    ),
    "kv_offload_recall_profile": (
        str | None,
        None,
        "JSON file with a recall interval for each layer, made by `sglang-scout profile` from a step log of your "
        "workload. With the key `recall: fixed` layers recall at these, with `recall: adaptive` they are the first "
        "estimates. Default: no file.",
    ),
    "kv_offload_cpus": (
        str | None,
        None,
        "CPUs for the attention threads, one thread each, for example 0-35 or 0,2,4. They are taken exactly as "
        "given, so leave some for the server. If all belong to one NUMA node, KV pages are allocated on it. With "
        "`--tp-size` they are divided among the ranks. `sglang-scout doctor` prints the default for a machine. "
        "Default: most cores of the GPU's NUMA node, one thread each, the rest being left to the server; on the CPU "
        "device every CPU of the process.",
    ),
    "kv_offload_config": (
        str | None,
        None,
        "Further settings as a JSON object, or @FILE. docs/reference/configuration.md describes the keys: "
        f"{', '.join(name for name, key in KEYS.items() if key.is_public)}. Default: no further settings.",
    ),
}
