"""The report as a picture, in the form of the paper's Figure 11. Imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from sglang_scout.cli.breakdown import PARTS, Breakdown  # noqa: E402
from sglang_scout.cli.trace_file import Trace  # noqa: E402

COLORS = {
    "boundary": "#b0b0b0",
    "ahead": "#76b7b2",
    "attention": "#4e79a7",
    "rest": "#a0cbe8",
    "wait": "#e15759",
    "fallback": "#f28e2b",
    "verify": "#edc948",
    "outside": "#d9d9d9",
}
BUSY, IDLE = "#59a14f", "#f2f2f2"


def draw(found: Breakdown, trace: Trace, target: Path) -> None:
    """Writes the picture: a step of the device beside the worker and the copies, and the leads.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the kind of file.
    """
    figure, (bars, leads) = plt.subplots(1, 2, figsize=(11, 4.8), width_ratios=(3, 2))
    try:
        _bars(bars, found)
        _leads(leads, found)
        figure.suptitle(
            f"{found.steps} decode steps, policy {trace.facts.get('policy')}, precompute "
            f"{trace.facts.get('precompute')}, recall {trace.facts.get('recall')}"
        )
        figure.tight_layout()
        figure.savefig(target, dpi=150)
    finally:
        plt.close(figure)


def _bars(axes: Any, found: Breakdown) -> None:
    step_us = found.step_us
    at = 0.0
    for key, text in PARTS.items():
        us = found.parts_us[key]
        if us <= 0:
            continue
        label = f"{text} ({100 * us / step_us:.0f} %)"
        axes.bar("device", us, bottom=at, color=COLORS[key], label=label)
        at += us
    copy_us = sum(c.us for c in found.copies) / found.steps
    busy = {name.removeprefix("worker "): us for name, us in found.thread_busy_us.items()}
    if len(busy) > 8:  # a bar for each would not be readable
        busy = {"any worker\nthread": found.worker_busy_us}
    for name, us in {**busy, "copies": copy_us}.items():
        where = name.replace(" (", "\n(")
        axes.bar(where, us, color=BUSY)
        axes.bar(where, max(0.0, step_us - us), bottom=us, color=IDLE)
        axes.text(where, us, f"{100 * us / step_us:.0f} %", ha="center", va="bottom")
    axes.set_ylabel("us per decode step")
    axes.set_title("Where the time goes\n(green is busy)", fontsize="medium")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _leads(axes: Any, found: Breakdown) -> None:
    boxes = [
        {
            "label": str(lead.layer),
            "whislo": lead.min_us,
            "q1": lead.p10_us,
            "med": lead.median_us,
            "q3": lead.p90_us,
            "whishi": lead.max_us,
        }
        for lead in found.leads
    ]
    if boxes:
        axes.bxp(boxes, showfliers=False)
    axes.axhline(0, color="#e15759", linewidth=0.8)
    axes.set_xlabel("layer")
    axes.set_ylabel("us before need (below 0: too late)")
    axes.set_title("Lead of the answers\n(min, p10, median, p90, max)", fontsize="medium")
