"""The picture of benchmark/accuracy/suite.py, in the form of the paper's Figure 7: score by budget."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt

from benchmark.accuracy.policies import FULL, PLAIN, Setting
from benchmark.accuracy.table import Scores
from benchmark.rows import Row

COLORS = {
    "full": "#404040",
    "scout": "#1b6ca8",
    "scout-signs": "#2a9d4e",
    "scout-real-query": "#5fb0d9",
    "quest": "#d98032",
    "recent": "#a0a0a0",
}
MARKERS = {"scout": "o", "scout-signs": "D", "scout-real-query": "s", "quest": "^", "recent": "v"}


def draw(rows: list[Row]) -> Any:
    """A panel for each length, a line for each policy, whiskers for the 95 % intervals."""
    scores = Scores(rows)
    count = len(scores.lengths)
    across = count if count <= 3 else math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    fig, axes = plt.subplots(
        down, across, figsize=(1.5 + 4.2 * across, 1.2 + 3.6 * down), sharey=True, squeeze=False
    )
    panels = axes.ravel()
    for ax, length in zip(panels, scores.lengths, strict=False):
        full = scores.mean(Setting(FULL), length) if FULL in scores.policies else None
        if full:
            value, low, high = (100 * x for x in full)
            ax.axhline(value, color=COLORS[FULL], linewidth=1.2, label=PLAIN[FULL])
            ax.axhspan(low, high, color=COLORS[FULL], alpha=0.12, linewidth=0)
        for policy in scores.policies:
            if policy in MARKERS:
                _line(ax, scores, policy, length)
        ax.set_title(f"{length} tokens", fontsize=10)
        ax.set_xscale("log", base=2)
        ax.set_xticks(scores.budgets, [str(b) for b in scores.budgets])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.set_ylim(-2, 104)
    for ax in panels[len(scores.lengths) :]:
        ax.set_axis_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("right answers, percent")
    for ax in axes[-1]:
        ax.set_xlabel("budget, tokens")
    handles, labels = panels[0].get_legend_handles_labels()
    anchor = (0.5, 0.82)  # where no curve runs in a long text
    panels[count - 1].legend(
        handles, labels, fontsize=8, loc="upper center", bbox_to_anchor=anchor, ncols=2
    )
    model = scores.rows[0]["model"]
    fig.suptitle(f"{model}: mean of {len(scores.tasks)} tasks, exact answers", fontsize=11)
    return fig


def _line(ax: Any, scores: Scores, policy: str, length: int) -> None:
    """Whiskers are moved apart a little, so that equal scores can be told apart."""
    found = [(b, scores.mean(Setting(policy, b), length)) for b in scores.budgets]
    known = [(b, *(100 * x for x in mean)) for b, mean in found if mean is not None]
    if not known:
        return
    others = [name for name in scores.policies if name in MARKERS]
    shift = 1.03 ** (others.index(policy) - (len(others) - 1) / 2)
    budgets = [b * shift for b, *_ in known]
    values = [value for _, value, _, _ in known]
    below = [max(0.0, value - low) for _, value, low, _ in known]
    above = [max(0.0, high - value) for _, value, _, high in known]
    ax.errorbar(
        budgets, values, yerr=[below, above], color=COLORS[policy], marker=MARKERS[policy],
        markersize=5, linewidth=1.4, elinewidth=0.9, label=PLAIN[policy],
    )  # fmt: skip
