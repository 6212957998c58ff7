"""The picture of benchmark/predicted_query.py: one row of panels per model and workload."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt

from rows import Row

COLORS = {"next_layer": "#8d8d8d", "extrapolate": "#5fb0d9", "learned": "#1b6ca8"}
PAPER_COSINES = (0.93, 0.97)


def draw(rows: list[Row]) -> Any:
    """Per layer: cosine, overlap at the smallest k, and attention weight covered there."""
    rows = [r for r in rows if r["status"] == "ok" and r["impl"] in COLORS]
    panels = list(dict.fromkeys((r["model"], r["workload"]) for r in rows))
    fig, axes = plt.subplots(
        len(panels), 3, figsize=(12, 3.1 * len(panels) + 0.6), sharey=True, squeeze=False
    )
    for line, panel in zip(axes, panels, strict=True):
        mine = [r for r in rows if (r["model"], r["workload"]) == panel]
        k = min((k for r in mine for k in r["at"]), key=int)
        _bars(line[0], mine, lambda r: r["cosine"])
        _bars(line[1], mine, lambda r, k=k: r["at"][k]["overlap"])
        _bars(line[2], mine, lambda r, k=k: r["at"][k]["mass"])
        for key, style, label in (
            ("mass_real", "-", "by the real query"),
            ("mass_best", ":", "best k pages"),
        ):
            for layer in sorted({r["layer"] for r in mine}):
                level = next(r["at"][k][key] for r in mine if r["layer"] == layer)
                line[2].plot(
                    [layer - 0.42, layer + 0.42], [level, level], style, color="black",
                    linewidth=1.2, label=label if layer == mine[0]["layer"] else None,
                )  # fmt: skip
        line[0].axhspan(*PAPER_COSINES, color="#b03030", alpha=0.15, label="paper, 7B to 12B")
        tokens = mine[0]["tokens"]
        line[0].set_title(
            f"{panel[0]}, {panel[1]}, {tokens} tokens: cosine to the real query",
            fontsize=9,
            loc="left",
        )
        line[1].set_title(f"same pages as the real query's, k={k}", fontsize=9, loc="left")
        line[2].set_title(f"attention weight in the pages, k={k}", fontsize=9, loc="left")
        for ax in line:
            ax.set_xlabel("layer")
            layers = sorted({r["layer"] for r in mine})
            ax.set_xticks(layers[:: 1 + len(layers) // 12])
            ax.grid(axis="y", alpha=0.3)
            ax.set_axisbelow(True)
    axes[0, 0].set_ylim(0, 1.02)
    for ax in (axes[0, 0], axes[0, 2]):
        ax.legend(fontsize=7, loc="lower right")
    return fig


def _bars(ax: Any, rows: list[Row], value: Any) -> None:
    names = [n for n in COLORS if any(r["impl"] == n for r in rows)]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        mine = [r for r in rows if r["impl"] == name]
        at = [r["layer"] + (place - (len(names) - 1) / 2) * width for r in mine]
        ax.bar(at, [value(r) for r in mine], width * 0.92, color=COLORS[name], label=name)
