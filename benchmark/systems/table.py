"""Markdown tables of the rows of run.py, one per file.

    python -m benchmark.systems.table docs/results/systems_smollm2.jsonl

Pages are per step and layer: those selected that were on the CPU, and those copied for this step only.
Copied: by recall and fetching, per step. Waited: for the CPU's part, per step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark.accuracy.policies import FULL, plain
from benchmark.rows import Row, markdown_table, read_rows

BY_HEAD = ("sparda",)
"""Systems that fetch pages per KV head."""


def line(rows: list[Row], layers: int, page_bytes: int, kv_heads: int) -> list[str]:
    """The table row of one setting."""
    first, right = rows[0], sum(row["right"] for row in rows)
    budget = first["budget_tokens"]
    name = plain(first["policy"])
    cells = [name, str(budget or "–"), f"{right} of {sum(row['asked'] for row in rows)}"]
    if first["policy"] == FULL:
        return [*cells, "", "", "", ""]
    sums = {key: sum(row["offload"].get(key, 0) for row in rows) for key in first["offload"]}
    steps = max(sums["steps"], 1)
    each = page_bytes // kv_heads if first["policy"] in BY_HEAD else page_bytes
    copied = sums.get("recall_bytes", 0) + sums.get("fetched_pages", 0) * each
    return [
        *cells,
        f"{sums['cpu_pages'] / steps / layers:.1f}",
        f"{sums.get('fetched_pages', 0) / steps / layers:.1f}",
        f"{copied / steps / 2**20:.2f}",
        f"{sums.get('gpu_wait_us', 0) / steps / 1e3:.1f}",
    ]


def table(rows: list[Row], *sizes: int) -> str:
    """``sizes``: layers, bytes of a page, KV heads."""
    settings = dict.fromkeys((row["policy"], row["budget_tokens"]) for row in rows)
    lines = []
    for policy, budget in settings:
        mine = [r for r in rows if (r["policy"], r["budget_tokens"]) == (policy, budget)]
        lines.append(line(mine, *sizes))
    head = ["system", "budget", "right", "CPU pages", "fetched pages", "MiB copied", "ms waited"]
    return markdown_table(head, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--page-bytes", type=int, default=2 * 32 * 3 * 64 * 4, help="K and V")
    parser.add_argument("--kv-heads", type=int, default=3)
    args = parser.parse_args(argv)
    for path in args.rows:
        rows = [row for row in read_rows(path) if row.get("status") == "ok"]
        print(f"{path.name}\n\n{table(rows, args.layers, args.page_bytes, args.kv_heads)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
