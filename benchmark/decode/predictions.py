"""Predictions of the step model (sglang_scout/cli/step_model.py) by model, KV type, device, context, host pages.

    python -m benchmark.decode.predictions --out docs/results/predictions.jsonl     # prints tables for the H100

Nothing is measured; `note` says what a prediction is worth. Rows (format: rows.py, untimed): `batch` and
`stock_batch`, `stock_tokens_per_s`, and as [low end, high end] `tokens_per_s`, `step_us`, `bound`, `parts_us`,
`speed_up`, `wins_from` and `wins_host_gib`: the batch and the GiB of pages from which on ours is faster.
`host_gib` is pages alone: a machine of 128 GiB has about 100 GiB for them.
"""

from __future__ import annotations

import itertools
import operator
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark import rows
from benchmark.decode.model import MODELS, SIZES, write_config
from sglang_scout.cli.sizes import GIB, make_plan
from sglang_scout.cli.step_model import CAVEAT, DEVICES, predict

CONTEXTS = (16384, 32768, 65536, 131072)
HOST_GIB = (128, 256, 512)
KV_TYPES = ("auto", "fp8_e4m3")
GPUS = ("a100", "h100", "h200", "b200")


def add_row(
    writer: rows.Writer, folder: Path, name: str, kv: str, context: int, gpu: str, host: int
) -> rows.Row:
    device = DEVICES[gpu]
    flags = {"context_tokens": context, "host_gib": host, "kv_cache_dtype": kv}
    plan = make_plan(str(folder), gpu_gib=device.memory_bytes / GIB, **flags)
    ends = predict(plan, device)
    steps, stock = [end.offload for end in ends], ends[1].stock
    ours = {
        "batch": steps[1].batch,
        "tokens_per_s": [round(s.tokens_per_s) for s in steps],
        "step_us": [round(s.us) for s in steps],
        "bound": [s.bound for s in steps],
        "parts_us": [{part: round(us) for part, us in s.parts_us.items()} for s in steps],
        "stock_batch": stock.batch,
        "stock_tokens_per_s": round(stock.tokens_per_s),
        "speed_up": [end.speed_up and round(end.speed_up, 2) for end in ends],
        "wins_from": [end.wins_from for end in ends],
        "wins_host_gib": [x.wins_host_bytes and round(x.wins_host_bytes / GIB, 1) for x in ends],
    }
    about = {"model": name, "kv_cache_dtype": kv, "context": context, "host_gib": host}
    about["budget"] = plan.server.config.budget_tokens
    return writer.add(gpu, untimed=True, note=CAVEAT, **about, **ours)


def span(ends: list[Any], form: str = ",") -> str:
    low, high = ("-" if x is None else format(x, form) for x in ends)
    return low if low == high else f"{low} to {high}"


def table(found: list[rows.Row]) -> str:
    """Markdown of one device."""
    columns = [f"{host} GiB of pages" for host in HOST_GIB]
    lines, place = [], operator.itemgetter("model", "kv_cache_dtype", "context")
    for (model, kv, context), same in itertools.groupby(found, place):
        of = list(same)
        cells = [
            f"{span(r['tokens_per_s'])} ({r['batch']}), {span(r['speed_up'], '.1f')}x" for r in of
        ]
        stock = f"{of[0]['stock_tokens_per_s']:,} ({of[0]['stock_batch']})"
        name = f"{model}, {'bf16' if kv == 'auto' else 'fp8'}"
        lines.append([name, f"{context:,}", stock, *cells, span(of[-1]["wins_from"][::-1])])
    return rows.markdown_table(["model, KV", "context", "stock", *columns, "faster from"], lines)


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    options = parser.parse_args()
    writer = rows.Writer(options.out, rows.environment("predictions", ("sglang-scout",)))
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            folder = write_config(SIZES[name], Path(scratch) / name, CONTEXTS[-1])
            for kv, context, gpu, host in itertools.product(KV_TYPES, CONTEXTS, GPUS, HOST_GIB):
                add_row(writer, folder, name, kv, context, gpu, host)
    writer.close()
    print(f"{CAVEAT}\n")
    print(table([row for row in writer.rows if row["impl"] == "h100"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
