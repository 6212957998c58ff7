"""Pictures of benchmark rows; reads JSON lines only.

    python -m benchmark.plot FILE.jsonl [--out docs/results]

Rows of cpu_attention make cpu_attention.png: share of the machine's read bandwidth by shape, one panel per model.
Bars are medians, whiskers go from the 10th to the 90th percentile of the samples, an open bar is unstable (spread
above 10 %), a cross stands where an implementation was left out or failed. Rows of ring_latency make
ring_latency.png: the distribution of the round trips. Rows of predicted_query make predicted_query.png: cosine,
overlap and attention weight by layer. Rows of recall_modes make recall_modes.png: CPU compute ratio by step and
layer, copies, and time per token with and without recall and pre-computation. Rows of accuracy make accuracy.png:
right answers by budget, one panel per length. --name calls a picture otherwise. The captions hold command, commit and
machine.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plot_predicted_query import draw as draw_predicted_query

from benchmark.accuracy.plot_accuracy import draw as draw_accuracy
from benchmark.rows import ROOT, Row, percentile, read_rows
from benchmark.server.plot_recall_modes import draw as draw_recall_modes

GOAL_SHARE = 0.85
GOAL_MEDIAN_US, GOAL_P99_US = 10, 50
COLORS = {
    "native": "#1b6ca8",
    "vllm": "#4f9a63",
    "sgl-kernel": "#7a4fa3",
    "ipex-2.8": "#d98032",
    "sdpa-gather-grouped": "#8d8d8d",
    "sdpa-gather": "#c9c9c9",
}


def caption(row: Row) -> str:
    """Command, commit, machine."""
    changed = " with changes" if row["dirty"] else ""
    versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items() if k != "kernel")
    idle = ", ".join(f"{x:.0%}" for x in row["idle_before"]) or "unknown"
    text = (
        f"{row['command']}   commit {row['commit'][:12]}{changed}, {row['time_utc']}. {row['cpu']}, "
        f"{row['cores']} cores, idle before the run: {idle}. {versions}."
    )
    return "\n".join(textwrap.wrap(text, 130))


def family(impl: str, best_isa: str) -> str | None:
    """Which bar an implementation is; None: not in the picture (lower instruction sets, read loops)."""
    if impl == f"native-{best_isa}":
        return "native"
    for rival in ("sgl-kernel", "vllm"):
        if impl.startswith(f"{rival}-"):
            return rival
    return impl if impl in COLORS else None


def plot_attention(rows: list[Row], out: Path) -> None:
    """Bars of all cores on huge pages, best instruction set."""
    best_isa = rows[0]["native_best_isa"]
    sized = [r for r in rows if r.get("batch")]
    backing = "thp" if any(r["backing"] == "thp" for r in sized) else sized[0]["backing"]
    sized = [r for r in sized if r["backing"] == backing]
    threads = max(r["threads"] for r in sized if r["threads"])
    found: dict[tuple[Any, ...], Row] = {}
    for r in sized:
        name = family(r["impl"], best_isa)
        if name and r["threads"] in (threads, None):
            found[r["models"], r["H"], r["G"], r["D"], r["pages"], r["batch"], name] = r
    models = list(dict.fromkeys(key[:4] for key in found))
    names = [n for n in COLORS if any(key[6] == n for key in found)]
    fig, axes = plt.subplots(
        len(models),
        1,
        figsize=(12, 3 * len(models) + 1.4),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    sizes = sorted({key[4:6] for key in found})
    width = 0.8 / len(names)
    for ax, model in zip(axes[:, 0], models, strict=True):
        for j, name in enumerate(names):
            for i, size in enumerate(sizes):
                row = found.get((*model, *size, name))
                if row is not None:
                    _bar(ax, i + (j - (len(names) - 1) / 2) * width, width, row, COLORS[name])
        ax.axhline(GOAL_SHARE, color="#b03030", linewidth=1, linestyle="--")
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_title(f"{model[0]}: {model[1]} KV heads x {model[2]} query heads, D {model[3]}",
                     fontsize=10, loc="left")  # fmt: skip
        ax.set_ylabel("share of read bandwidth")
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
        rates = [
            found[key]["read_gb_per_s"]
            for key in found
            if key[:4] == model and found[key]["status"] == "ok"
        ]
        if rates:
            ax.annotate(
                f"read: {min(rates):.0f} to {max(rates):.0f} GB/s", (0.995, 0.93),
                xycoords="axes fraction", ha="right", va="top", fontsize=8,
            )  # fmt: skip
    axes[0, 0].set_ylim(0, 1.25)
    axes[-1, 0].set_xticks(
        range(len(sizes)), [f"{r} pages\nbatch {b}" for r, b in sizes], fontsize=9
    )
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=COLORS[n]) for n in names]
    labels = [f"{n} ({best_isa})" if n == "native" else n for n in names]
    handles.append(plt.Line2D([], [], color="#b03030", linestyle="--"))
    labels.append(f"goal {GOAL_SHARE:.0%}")
    title = f"Decode attention over pages of 32 tokens, {threads} threads, {backing} memory pages"
    axes[0, 0].annotate(title, (0.5, 1.33), xycoords="axes fraction", ha="center", fontsize=12)
    axes[0, 0].legend(
        handles, labels, loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=len(labels),
        fontsize=9, frameon=False,
    )  # fmt: skip
    _save(fig, rows[0], out)


def _bar(ax: Any, x: float, width: float, row: Row, color: str) -> None:
    if row["status"] != "ok":
        ax.plot([x], [0.03], marker="x", color=color, markersize=5)
        return
    share, median_us = row["share_of_read"], row["median_us"]
    low, high = (share * median_us / percentile(row["samples_us"], p) for p in (90, 10))
    filled = not row["unstable"]
    ax.bar(x, share, width * 0.92, color=color if filled else "none", edgecolor=color)
    ax.plot([x, x], [low, high], color="black", linewidth=0.9)


def plot_ring(rows: list[Row], out: Path) -> None:
    """Cumulative distribution of every row with samples, on a logarithmic axis."""
    fig, ax = plt.subplots(figsize=(10, 5.2))
    measured = [r for r in rows if r["status"] == "ok"]
    for r in measured:
        us = sorted(r["samples_us"])
        gap = f"after {r['gap_us']} us of rest" if r["gap_us"] else "back to back"
        label = (
            f"{r['impl']}, {r['rows']} row{'s' if r['rows'] > 1 else ''}, {gap}: "
            f"median {r['median_us']:.1f}, p99 {r['p99_us']:.1f} us"
        )
        ax.plot(us, [(i + 0.5) / len(us) for i in range(len(us))], linewidth=1.4, label=label)
    for us_goal, share in ((GOAL_MEDIAN_US, 0.5), (GOAL_P99_US, 0.99)):
        ax.plot([us_goal], [share], marker="<", color="#b03030", markersize=9, zorder=5)
        ax.annotate(
            f"goal: p{share * 100:.0f} by {us_goal} us", (us_goal, share), xytext=(8, -4),
            textcoords="offset points", fontsize=8, color="#b03030",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("round trip, microseconds")
    ax.set_ylabel("share of the samples")
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=8, loc="lower right")
    free = "both cores free" if rows[0].get("cores_free") else "cores in use by others"
    ax.set_title(f"From doorbell to done across two processes; {free}", fontsize=11)
    _save(fig, rows[0], out)


def plot_predicted_query(rows: list[Row], out: Path) -> None:
    _save(draw_predicted_query(rows), rows[0], out)


def plot_recall_modes(rows: list[Row], out: Path) -> None:
    _save(draw_recall_modes(rows), rows[0], out)


def plot_accuracy(rows: list[Row], out: Path) -> None:
    _save(draw_accuracy(rows), rows[0], out)


def _save(fig: Any, row: Row, out: Path) -> None:
    fig.tight_layout(rect=(0, 0.6 / fig.get_figheight(), 1, 1))  # room for the caption
    fig.text(0.01, 0.008, caption(row), fontsize=7, va="bottom", family="monospace")
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=130)
    plt.close(fig)
    print(out)


PLOTS = {
    "cpu_attention": plot_attention,
    "ring_latency": plot_ring,
    "predicted_query": plot_predicted_query,
    "recall_modes": plot_recall_modes,
    "accuracy": plot_accuracy,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument(
        "--name", help="of the picture, where FILE.jsonl holds one benchmark's rows"
    )
    args = parser.parse_args(argv)
    rows = [row for path in args.files for row in read_rows(path)]
    status = 1
    for benchmark, plot in PLOTS.items():
        mine = [r for r in rows if r["benchmark"] == benchmark]
        if any(r["status"] == "ok" for r in mine):
            plot(mine, args.out / f"{args.name or benchmark}.png")
            status = 0
    if status:
        print("no measured rows of a benchmark that has a plot", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
