"""The picture of benchmark/server/recall_modes.py: ratios, copies, and time per token of every mode."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt

from benchmark.rows import Row, percentile


def draw(rows: list[Row]) -> Any:
    """Ratio by step and by layer, what it costs to copy, and the four corners of Figure 12."""
    rows = [r for r in rows if r["status"] == "ok"]
    names = list(dict.fromkeys(r["impl"] for r in rows))
    runs = {name: [r for r in rows if r["impl"] == name] for name in names}
    ahead = [name for name in names if runs[name][0]["precompute"]]
    colors = {name: plt.get_cmap("tab10")(i) for i, name in enumerate(names)}
    first = rows[0]
    fig, axes = plt.subplots(2, 2, figsize=(13, 9.2))
    ((by_step, by_layer), (copies, corners)) = axes
    for name in ahead:
        curve = [
            sum(values) / len(values)
            for values in zip(*(r["ratio_curve"] for r in runs[name]), strict=True)
        ]
        after = sum(r["ratio"] for r in runs[name]) / len(runs[name])
        by_step.plot(
            range(1, len(curve) + 1), curve, color=colors[name], linewidth=1.2,
            label=f"recall {name}: {after:.3f} after step {first['skipped_steps']}",
        )  # fmt: skip
    by_step.axvline(first["skipped_steps"], color="#b0b0b0", linewidth=0.8)
    by_step.set_xlabel("steps of a request")
    by_step.set_title("Mean of the layers", fontsize=10)
    layers = len(first["ratio_by_layer"])
    width = 0.8 / len(ahead)
    for j, name in enumerate(ahead):
        ratios = [r["ratio_by_layer"] for r in runs[name]]
        mean = [sum(x) / len(x) for x in zip(*ratios, strict=True)]
        at = [i + (j - (len(ahead) - 1) / 2) * width for i in range(layers)]
        by_layer.bar(at, mean, width * 0.92, color=colors[name])
        for i, x in enumerate(at):
            values = [r[i] for r in ratios]
            by_layer.plot([x, x], [min(values), max(values)], color="black", linewidth=0.9)
    by_layer.set_xticks(range(layers), [f"layer {i}" for i in range(layers)])
    by_layer.set_title(f"After {first['skipped_steps']} steps; lines: all rounds", fontsize=10)
    for ax in (by_step, by_layer):
        ax.axhline(
            first["threshold"], color="#b03030", linewidth=1, linestyle="--", label="threshold"
        )
        ax.set_ylim(bottom=0)
        ax.set_ylabel("CPU compute ratio")
    by_step.legend(fontsize=8)
    mib = [
        sum(r["recall_bytes_per_step"] for r in runs[name]) / len(runs[name]) / 2**20
        for name in ahead
    ]
    copies.bar(ahead, mib, color=[colors[name] for name in ahead])
    for i, name in enumerate(ahead):
        pages = sum(r["recalled_pages_per_step"] for r in runs[name]) / len(runs[name])
        copies.text(i, mib[i], f"{pages:.1f} pages", ha="center", va="bottom", fontsize=9)
    copies.set_ylabel("MiB recalled per step, all layers")
    copies.set_title("Copies", fontsize=10)
    _corners(corners, runs, colors)
    fig.suptitle(
        f"{first['model']}: {first['requests']} requests of {first['input_tokens']} tokens, budget "
        f"{first['budget_tokens']}, device cache {first['resident_tokens']} tokens in all",
        fontsize=11,
    )
    return fig


def _corners(ax: Any, runs: dict[str, list[Row]], colors: dict[str, Any]) -> None:
    """Time per token of every mode; the part in which the device waits is dark."""
    for i, (name, mine) in enumerate(runs.items()):
        medians = sorted(r["median_us"] / 1e3 for r in mine)
        middle = percentile(medians, 50)
        waits = sum(r["gpu_wait_us_per_step"] for r in mine) / len(mine) / 1e3
        ax.bar(i, middle, color=colors[name], alpha=0.6)
        ax.bar(i, waits, color=colors[name])
        ax.plot([i, i], [medians[0], medians[-1]], color="black", linewidth=0.9)
        ax.text(i, medians[-1], f"{middle:.2f}", ha="center", va="bottom", fontsize=9)
    labels = [
        f"recall {r[0]['recall']}\n{'pre-computed' if r[0]['precompute'] else 'in its layer'}"
        for r in runs.values()
    ]
    ax.set_xticks(range(len(runs)), labels, fontsize=7)
    ax.set_ylabel("ms per token")
    ax.set_title(
        "Median of each round's median, lines: all rounds; dark: waiting for the CPU", fontsize=10
    )
