"""A recall profile as a picture, in the form of the paper's Figure 6. Imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

from sglang_scout.core.profile import RecallProfile  # noqa: E402

BETA_COLOR = "#e15759"


def draw(profile: RecallProfile, target: Path) -> None:
    """Writes the picture: ratios by step without recall (6a) and with it (6b), and the intervals.

    Raises:
        OSError: the file cannot be written.
    """
    figure, axes = plt.subplots(
        1, 3, figsize=(15, 4.6), width_ratios=(4, 4, 3), layout="constrained"
    )
    try:
        colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, profile.num_layers))
        _curves(axes[0], profile.curves, profile, colors, "Without recall")
        if profile.check is not None:
            _curves(axes[1], profile.check.curves, profile, colors, "With these intervals")
            axes[1].sharey(axes[0])
        else:
            axes[1].set_axis_off()
        _intervals(axes[2], profile, colors)
        figure.suptitle(
            f"{profile.model}, budget {profile.budget_tokens} tokens: {profile.workload}",
            fontsize="medium",
        )
        figure.savefig(target, dpi=130)
    finally:
        plt.close(figure)


def _curves(
    axes: Any, curves: list[list[float]], profile: RecallProfile, colors: Any, title: str
) -> None:
    steps = np.arange(1, len(curves[0]) + 1)
    thin = profile.num_layers > 8
    for layer, curve in enumerate(curves):
        axes.plot(
            steps,
            curve,
            color=colors[layer],
            linewidth=0.6 if thin else 1.0,
            label=None if thin else f"layer {layer}",
        )
    mean = np.mean(curves, axis=0)
    axes.plot(steps, mean, color="black", linewidth=1.6, label="mean of the layers")
    axes.axhline(profile.threshold, color=BETA_COLOR, linestyle="--", label="threshold")
    axes.set_title(f"{title}: mean {np.mean(curves):.3f}")
    axes.set_xlabel("steps after a request's pages were loaded")
    axes.set_ylabel("CPU compute ratio")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _intervals(axes: Any, profile: RecallProfile, colors: Any) -> None:
    axes.bar(range(profile.num_layers), profile.intervals, color=colors)
    if profile.num_layers <= 16:
        for layer, interval in enumerate(profile.intervals):
            axes.text(layer, interval, str(interval), ha="center", va="bottom", fontsize="small")
    axes.set_title(f"Recall intervals: mean {np.mean(profile.intervals):.1f}")
    axes.set_xlabel("layer")
    axes.set_ylabel("steps")
