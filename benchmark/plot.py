"""Pictures of benchmark rows; reads JSON lines only.

    python -m benchmark.plot docs/results/study_budgets.jsonl docs/results/budgets.png
    python -m benchmark.plot docs/results/predictions.jsonl docs/results/predictions.png
    python -m benchmark.plot docs/results/paper_figures.jsonl docs/results/paper_figures.png

    python -m benchmark.plot docs/results/recall.jsonl docs/results/recall.png

Rows of the study's budgets give facts found by budget, of recall the CPU's share, predictions speed-up by context, the
paper's figures predictions beside its numbers. Captions contain command, commit and machine.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.accuracy.planted import CUTS
from benchmark.accuracy.study.table import interval, paired
from benchmark.rows import Row, argument_parser, read_rows
from sglang_scout.core.profile import COLD_STEPS

PANELS = {
    "prompt": "the question is in the prompt",
    "facts": "the question is decoded, token by token",
}
SYSTEMS = {
    "reweighed-missing": ("--kv-offload scout, default digest", "tab:green", "o"),
    "real": ("Quest's min/max bounds, pages of 32, a selection per KV head", "tab:orange", "^"),
}
"""By the attending query: label, colour and marker."""


def found(rows: list[Row], field: str = "right") -> float:
    """Percent of the numbers asked for that were answered correctly."""
    answers = [x for row in rows for numbers in row[field] for x in numbers]
    return 100 * sum(answers) / len(answers)


def set_up(ax: Any, ticks: dict[int, str], **texts: Any) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.set(**texts)


def draw_budgets(rows: list[Row]) -> Any:
    """Planted numbers found, by budget: a panel for each form of the question, full attention as a line."""
    fig, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.9), sharey=True)
    for (part, title), ax in zip(PANELS.items(), axes, strict=True):
        by_setting = paired(rows, part)
        full = next(iter(by_setting.values()))
        ax.axhline(found(full, "full_right"), color="k", linestyle=":", label="full attention")
        for attends, (label, color, marker) in SYSTEMS.items():
            own = [x for x in by_setting.values() if x[0]["attends"] == attends]
            budgets, means = [x[0]["budget_tokens"] for x in own], [found(x) for x in own]
            ax.plot(budgets, means, color=color, marker=marker, label=label)
            low, high = zip(*(interval(x, found) for x in own), strict=True)
            ax.fill_between(budgets, low, high, color=color, alpha=0.15, linewidth=0)
        ticks = {x: f"{x:,}" for x in budgets}
        set_up(ax, ticks, xlabel="budget, tokens", title=title, ylim=(0, 100))
    axes[0].set_ylabel("planted numbers found, %")
    axes[0].legend(fontsize=8, loc="upper left")
    texts = f"{len(full)} texts, questions after {CUTS[0]:,} to {CUTS[-1]:,} tokens"
    fig.suptitle(f"{rows[0]['model']}, {texts}; bands: 95 % intervals over texts", fontsize=11)
    return fig


def draw_predictions(rows: list[Row]) -> Any:
    """Range of the speed-up over stock by context: a column for each model, a row for each KV type, a band for each
    host memory."""
    rows = [r for r in rows if r["impl"] == "h100"]
    keys = "model", "kv_cache_dtype", "host_gib"
    models, kinds, hosts = (list(dict.fromkeys(r[key] for r in rows)) for key in keys)
    sizes = 4.2 * len(models), 3.2 * len(kinds) + 0.6
    fig, axes = plt.subplots(len(kinds), len(models), figsize=sizes, sharey="row", squeeze=False)
    for (kv, model), ax in zip(itertools.product(kinds, models), axes.flat, strict=True):
        for i, host in enumerate(hosts):
            own = [r for r in rows if [r[key] for key in keys] == [model, kv, host]]
            own = [r for r in own if r["speed_up"][0]]
            ticks = {r["context"] // 1024: f"{r['context'] // 1024}k" for r in own}
            low, high = zip(*(r["speed_up"] for r in own), strict=True)
            label = f"{host} GiB of host pages"
            ax.fill_between(list(ticks), low, high, color=f"C{i}", alpha=0.2, label=label)
            ax.plot(list(ticks), list(zip(low, high, strict=True)), "o-", color=f"C{i}", ms=3)
        ax.axhline(1, color="k", linewidth=0.8)
        title = f"{model}, {'bf16' if kv == 'auto' else kv}, H100"
        set_up(ax, ticks, title=title, xlabel="context, tokens")
    fig.supylabel("tokens per second over stock's, low to high end", fontsize=10)
    axes[0][0].legend(fontsize=8)
    fig.suptitle("\n".join(textwrap.wrap(rows[0]["note"], 110)), fontsize=10)
    return fig


def draw_paper_figures(rows: list[Row]) -> Any:
    """The paper's Figure 8 as bands by length, of Figures 9, 11 and 12 a line from low to high end for each number;
    stars are the paper's numbers."""
    fig, axes = plt.subplots(2, 2, figsize=(12, 7.4))
    claims = [row for row in rows if row["impl"] == "claim"]
    systems = list(dict.fromkeys(row["impl"] for row in rows if row["impl"] != "claim"))
    ax = axes[0][0]
    for i, system in enumerate(systems):
        own = [row for row in rows if row["impl"] == system]
        ticks = {row["context"]: f"{row['context'] // 1024}k" for row in own}
        low, high = zip(*(row["over_full"] for row in own), strict=True)
        ax.fill_between(list(ticks), low, high, color=f"C{i}", alpha=0.2, label=system)
        ax.plot(list(ticks), list(zip(low, high, strict=True)), "o-", color=f"C{i}", ms=3)
    ax.plot(max(ticks), claims[0]["paper"], "k*", ms=11, label=f"the paper, {systems[0]}")
    ax.axhline(1, color="k", linewidth=0.8)
    set_up(ax, ticks, title="Figure 8: tokens per second over FullKV's", xlabel="context, tokens")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(fontsize=8)
    titles = {"9": "speed-up by a larger batch", "11": "GPU idle, %", "12": "speed-up by each part"}
    for (figure, title), ax in zip(titles.items(), axes.flat[1:], strict=True):
        own = [row for row in claims if row["figure"] == figure][::-1]
        for y, row in enumerate(own):
            low, high = row["model"]["low end"], row["model"]["high end"]
            ax.plot([low, high], [y, y], color="C0", linewidth=4, alpha=0.3)
            ax.plot(low, y, "o", color="C0", mfc="w", label="low end" if not y else None)
            ax.plot(high, y, "o", color="C0", label="high end" if not y else None)
            ax.plot(row["paper"], y, "k*", ms=11, label="the paper" if not y else None)
        ax.set_yticks(range(len(own)), [row["claim"].removesuffix(", GPU idle, %") for row in own])
        ax.set(title=f"Figure {figure}: {title}", ylim=(-0.5, len(own) - 0.5))
        ax.grid(alpha=0.3, axis="x")
        ax.legend(fontsize=8)
    fig.suptitle("\n".join(textwrap.wrap(rows[0]["note"], 110)), fontsize=10)
    return fig


def draw_recall(rows: list[Row]) -> Any:
    """The paper's Figure 6: CPU compute ratio without recall by step and by layer, and the intervals."""
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.9))
    names = {"default": "default", "paper": "the paper's set-up"}
    shown = [r for r in rows if r["recall"] == "off" and r["setting"] in names]
    for i, row in enumerate(r for r in shown if r["budget_tokens"] >= 1024):
        label = f"{names[row['setting']]}, {row['budget_tokens']:,} tokens"
        layers = range(len(row["intervals"]))
        steps = range(COLD_STEPS + 1, len(row["ratio_by_step"]) + COLD_STEPS + 1)
        axes[0].plot(steps, row["ratio_by_step"], label=label)
        axes[1].plot(layers, row["ratio_by_layer"], ".-")
        axes[2].bar([x + 0.2 * i for x in layers], row["intervals"], width=0.2)
    for ax in axes[:2]:
        ax.axhline(0.12, color="k", linestyle=":", linewidth=0.8)
        ax.set(ylim=(0, None), ylabel="CPU compute ratio")
    axes[0].set(xlabel="steps, without recall", title="mean of the layers")
    axes[1].set(xlabel="layer", title="mean of the steps")
    axes[2].set(xlabel="layer", title="profiled recall intervals", ylabel="steps")
    axes[0].legend(fontsize=8)
    texts = f"{rows[0]['texts']} texts of {rows[0]['input_tokens']:,} tokens"
    fig.suptitle(f"{rows[0]['model']}, {texts}; dotted: the threshold 0.12", fontsize=11)
    return fig


PLOTS = {
    "study": draw_budgets,
    "predictions": draw_predictions,
    "paper_figures": draw_paper_figures,
    "recall": draw_recall,
}


def caption(row: Row) -> str:
    """Command, commit, machine."""
    changed = " with changes" if row["dirty"] else ""
    versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items() if k != "kernel")
    text = (
        f"{row['command']}   commit {row['commit'][:12]}{changed}, {row['time_utc']}. {row['cpu']}, "
        f"{row['cores']} cores. {versions}."
    )
    return "\n".join(textwrap.wrap(text, 130))


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("out", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    rows = [row for row in read_rows(args.file) if row["status"] == "ok"]
    if not rows or rows[0]["benchmark"] not in PLOTS:
        print(f"{args.file}: no measured rows of {' or '.join(PLOTS)}", file=sys.stderr)
        return 1
    fig = PLOTS[rows[0]["benchmark"]](rows)
    fig.tight_layout(rect=(0, 0.6 / fig.get_figheight(), 1, 1))  # room for the caption
    fig.text(0.01, 0.008, caption(rows[0]), fontsize=7, va="bottom", family="monospace")
    fig.savefig(args.out, dpi=130)
    plt.close(fig)
    return 0


if __name__ == "__main__":
    sys.exit(main())
