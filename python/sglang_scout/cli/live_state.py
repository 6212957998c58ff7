"""The dashboard's data: a decode server's state, and rates from it and the previous one."""

from __future__ import annotations

from typing import Any

State = dict[str, Any]


def view(before: State, now: State, seconds: float) -> dict[str, Any]:
    """Rates and values over the ``seconds`` between two states of ``/server_info``.

    Args:
        before: ``internal_states[0].kv_offload`` of the previous poll.
        now: that of this poll, of the same server.

    Returns:
        JSON: pages by layer and place, each layer's CPU compute ratio in these seconds (None without a step), its
        threshold or None, and rates. A restarted server counts from zero.
    """
    if now["steps"] < before["steps"]:
        before = dict.fromkeys(before, 0) | {
            "cpu_compute_ratio_by_layer": [],
            "worker": {"pages": 0},
        }
    layers = len(now["cpu_compute_ratio_by_layer"])

    def rate(key: str, unit: float = 1.0) -> float:
        return (now[key] - before[key]) / seconds / unit

    steps = now["steps"] - before["steps"]
    budget_pages = now["budget_tokens"] // now["page_size"]
    cpus = now["worker"]["cpus"]
    # A new worker starts at 0.
    worker_pages = max(0, now["worker"]["pages"] - before["worker"]["pages"])
    return {
        "policy": now["policy"],
        "backend": now["backend"],
        "worker": {key: now["worker"][key] for key in ("state", "restarts", "last_error")} | {"cpus": len(cpus)},
        "host_pages": {"used": now["host_pages_used"], "total": now["host_pages_total"]},
        "resident": now["resident_pages_by_layer"],
        "copying": now["copying_pages_by_layer"],
        "slots": now["resident_slots"] // layers,
        "cpu_ratio": _recent_ratios(before, now, layers),
        "threshold": now["recall"].get("threshold"),
        "requests": (now["budget_pages"] - before["budget_pages"]) / (steps * layers * budget_pages) if steps else 0,
        "steps_per_s": rate("steps"),
        "wait_share": rate("gpu_wait_us", 1e6),
        "recall_wait_share": rate("recall_wait_us", 1e6),
        "recall_bytes_per_s": rate("recall_bytes"),
        "worker_bytes_per_s_core": worker_pages * _page_bytes(now, layers) / seconds / max(1, len(cpus)),
        "fallback_pages_per_s": rate("fallback_pages"),
    }  # fmt: skip


def _recent_ratios(before: State, now: State, layers: int) -> list[float | None]:
    """The state has ratios since start, and budget pages summed over layers, equal for each."""
    first, last = before["budget_pages"], now["budget_pages"]
    if first == last:
        return [None] * layers
    earlier = before["cpu_compute_ratio_by_layer"] or [0.0] * layers
    return [
        max(0.0, (b * last - a * first) / (last - first))
        for a, b in zip(earlier, now["cpu_compute_ratio_by_layer"], strict=True)
    ]


def _page_bytes(state: State, layers: int) -> float:
    """K and V of a page in one layer."""
    row = next(row for row in state["plan"] if row["what"] == "host pages")
    return row["bytes"] / row["count"] / layers
