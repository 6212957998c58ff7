"""One table of what a call of scripts/gpu_check.sh found, from its rows and steps.

    python -m benchmark.gpu_table OUTDIR --since 2026-01-31T12:00:00

A line for each step, check and row since then. For decode steps and servers also tokens per second relative to the
fastest full attention of the same model, KV type and context in the same call.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark import rows

BASELINES = ("full-flashinfer", "full-ours", "stock")
SIZES = """kv context batch cache precompute digest recall repeat B N bits k resident columns pages
    from""".split()
RESULTS = """p99_us bandwidth_share cpu_compute_ratio wait_share fallback_pages reached_gb seconds
    refused host_gb""".split()
"""Fields that are shown, of rows that have them."""


def key(row: rows.Row) -> tuple[Any, ...]:
    """What makes two rates comparable."""
    return tuple(row.get(x) for x in ("benchmark", "model", "kv", "context", "rehearsal"))


def line(row: rows.Row, full: dict[tuple[Any, ...], float]) -> tuple[str, str, str]:
    """``full``: the fastest full attention, by key."""
    what = row.get("check") or row.get("server") or row.get("op") or row["impl"]
    size = " ".join(f"{name}={row[name]}" for name in SIZES if name in row)
    if row["status"] != "ok":
        return what, size, f"{row['status'].upper()}: {row['reason'][:160]}"
    found = [f"{row['median_us']:,.1f} us"] if "median_us" in row else []
    if "tokens_per_s" in row:
        found.append(f"{row['tokens_per_s']:,.0f} tok/s")
        if key(row) in full:
            found.append(f"{row['tokens_per_s'] / full[key(row)]:.2f} x full")
    found += [f"{name} {row[name]}" for name in RESULTS if row.get(name) is not None]
    found += [f"SIMULATED: {row['simulated']}"] if "simulated" in row else []
    found += ["rehearsal"] if row.get("rehearsal") else []
    return what, size, ", ".join(found) or "ok"


def lines(steps: Iterable[dict[str, Any]], found: list[rows.Row]) -> list[tuple[str, str, str]]:
    made = [
        (f"step {s['step']}", "", f"status {s['exit_status']}, {s['seconds']} s of {s['limit_s']}")
        if "exit_status" in s
        else (f"step {s['step']}", "", f"SKIPPED: {s['skipped']}")
        for s in steps
    ]
    full: dict[tuple[Any, ...], float] = {}
    for row in found:
        if row["impl"] in BASELINES and "tokens_per_s" in row:
            full[key(row)] = max(row["tokens_per_s"], full.get(key(row), 0.0))
    return made + [line(row, full) for row in found]


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--since", default="")
    options = parser.parse_args()
    path, ended = options.folder / "rows.jsonl", options.folder / "steps.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # cut off where its writer was ended
            found.append(json.loads(line))
    steps = map(json.loads, ended.read_text().splitlines() if ended.exists() else [])
    found = [row for row in found if row["time_utc"] >= options.since]
    made = lines((s for s in steps if s["time_utc"] >= options.since), found)
    devices = {row["device"] for row in found if "device" in row}
    print(f"{', '.join(sorted(devices))}: every figure is of this call")
    widths = [max((len(line[i]) for line in made), default=0) for i in (0, 1)]
    for what, size, result in made:
        print(f"{what:{widths[0]}}  {size:{widths[1]}}  {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
