"""Pictures of benchmark rows; reads JSON lines only.

    python -m benchmark.plot FILE.jsonl [--out docs/results] [--name NAME]

Rows of recall_modes make recall_modes.png: CPU compute ratio by step and layer, copies, and time per token with and
without recall and pre-computation. Rows of accuracy make accuracy.png: right answers by budget, one panel per length.
The captions hold command, commit and machine.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.accuracy.plot_accuracy import draw as draw_accuracy
from benchmark.rows import ROOT, Row, read_rows
from benchmark.server.plot_recall_modes import draw as draw_recall_modes

PLOTS = {"recall_modes": draw_recall_modes, "accuracy": draw_accuracy}


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--name", help="of the picture (default: of the benchmark)")
    args = parser.parse_args(argv)
    rows = [row for row in read_rows(args.file) if row["status"] == "ok"]
    if not rows or rows[0]["benchmark"] not in PLOTS:
        print(f"{args.file}: no measured rows of {' or '.join(PLOTS)}", file=sys.stderr)
        return 1
    benchmark = rows[0]["benchmark"]
    fig = PLOTS[benchmark](rows)
    fig.tight_layout(rect=(0, 0.6 / fig.get_figheight(), 1, 1))  # room for the caption
    fig.text(0.01, 0.008, caption(rows[0]), fontsize=7, va="bottom", family="monospace")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name or benchmark}.png"
    fig.savefig(path, dpi=130)
    plt.close(fig)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
