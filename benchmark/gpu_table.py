"""One table of what a call of scripts/gpu_check.sh found, from its rows and steps.

    python -m benchmark.gpu_table OUTDIR --since 2026-01-31T12:00:00

A line for each step, check and row since then. For decode steps and servers also tokens per second relative to the
fastest full attention of the same model, KV type and context in the same call.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark import rows

Line = tuple[str, str, str]
BASELINES = ("full-flashinfer", "full-ours", "stock")


def key(row: rows.Row) -> tuple[Any, ...]:
    """What makes two rates comparable."""
    return tuple(row.get(x) for x in ("benchmark", "model", "kv", "context", "rehearsal"))


def variant(row: rows.Row) -> str:
    """What a row of co-attention differs in from the others."""
    words = [f"{row['cache']} cache"] if "cache" in row else []
    words += ["no pre-computation"] if row.get("precompute") is False else []
    words += [f"{row['digest']} digests"] if "digest" in row else []
    words += [f"recall {row['recall']}"] if row.get("recall", "adaptive") != "adaptive" else []
    return ", ".join([*words, *(["again"] if row.get("repeat") else [])])


def speed(found: list[rows.Row]) -> Iterator[Line]:
    """Decode steps and servers."""
    rates = [r for r in found if "tokens_per_s" in r]
    full = {
        key(r): max(x["tokens_per_s"] for x in rates if x["impl"] in BASELINES and key(x) == key(r))
        for r in rates
        if r["impl"] in BASELINES
    }
    for row in rates:
        what = row.get("server", row["impl"]) + (", rehearsal" if row.get("rehearsal") else "")
        size = f"{row.get('kv', '')} {row['context']} x {row['batch']} {variant(row)}"
        parts = [f"{row['median_us'] / 1e3:.2f} ms", f"{row['tokens_per_s']:,.0f} tok/s"]
        if base := full.get(key(row)):
            parts.append(f"{row['tokens_per_s'] / base:.2f} x full")
        shares = ("bandwidth_share", "cpu_compute_ratio", "wait_share")
        parts += [
            f"{name.split('_')[0]} {100 * row[name]:.1f} %"
            for name in shares
            if row.get(name) is not None
        ]
        if "simulated" in row:
            parts.append(f"SIMULATED: {row['simulated']}")
        yield what, size, ", ".join(parts)


def other(row: rows.Row) -> Line | None:
    """Of a row without a rate; None: it is in another line."""
    if row["status"] != "ok":
        what = row.get("check") or row.get("server") or row.get("op") or row["impl"]
        return what, str(row.get("context", "")), f"{row['status'].upper()}: {row['reason'][:160]}"
    if row["benchmark"] == "host_probe":
        named = ("reached_gb", "seconds", "refused", "host_gb")
        shown = (f"{name} {row[name]}" for name in named if name in row)
        return f"host {row['impl']}", "", ", ".join(shown)
    if "check" in row:
        return row["check"], row.get("server", ""), "ok"
    if row["benchmark"] == "gpu_ring":
        return row["op"], f"B={row['B']}", f"{row['median_us']:.1f} us, p99 {row['p99_us']:.1f}"
    if "bandwidth_share" in row and "op" in row:
        shown = ("B", "N", "bits", "k", "resident", "columns", "kv", "pages", "from")
        size = " ".join(f"{k}={row[k]}" for k in shown if k in row)
        what = f"{row['op']} {row['impl']}"
        return what, size, f"{row['median_us']:.1f} us, {100 * row['bandwidth_share']:.0f} %"
    return None


def lines(steps: Iterable[dict[str, Any]], found: list[rows.Row]) -> list[Line]:
    made = [
        (f"step {s['step']}", "", f"status {s['exit_status']}, {s['seconds']} s of {s['limit_s']}")
        if "exit_status" in s
        else (f"step {s['step']}", "", f"SKIPPED: {s['skipped']}")
        for s in steps
    ]
    made += speed(found)
    return made + [x for row in found if "tokens_per_s" not in row and (x := other(row))]


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
