"""Pictures of benchmark rows; reads JSON lines only.

    python -m benchmark.plot docs/results/study_budgets.jsonl docs/results/budgets.png
    python -m benchmark.plot docs/results/predictions.jsonl docs/results/predictions.png

Rows of the study's budgets give facts found by budget, predictions speed-up by context. Captions contain command,
commit and machine.
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


PLOTS = {"study": draw_budgets, "predictions": draw_predictions}


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
