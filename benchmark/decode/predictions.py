"""What the model of a step (sglang_scout/cli/step_model.py) predicts: a row per model, device, context and host memory.

    python -m benchmark.decode.predictions --out docs/results/predictions.jsonl     # prints a table of the H100's

Nothing is measured. Rows (format: rows.py, untimed): `tokens_per_s`, `batch` and `bound` of both, `speed_up`,
`wins_from` and `wins_host_gib`, from which batch and host memory on ours is faster.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from benchmark import rows
from benchmark.server.speed import SHAPES, write_config
from sglang_scout.cli.sizes import GIB, make_plan
from sglang_scout.cli.step_model import DEVICES, predict

CONTEXTS = (16384, 32768, 65536, 131072)
HOST_GIB = (128, 256, 512)


def add_row(
    writer: rows.Writer, folder: Path, name: str, context: int, gpu: str, host: int
) -> rows.Row:
    device = DEVICES[gpu]
    plan = make_plan(
        str(folder), context_tokens=context, host_gib=host, gpu_gib=device.memory_bytes / GIB
    )
    found = predict(plan, device)
    wins = found.wins_host_bytes
    return writer.add(
        gpu, untimed=True, model=name, context=context, host_gib=host,
        budget=plan.sizes.budget_tokens, batch=found.offload.batch, bound=found.offload.bound,
        tokens_per_s=round(found.offload.tokens_per_s), step_us=round(found.offload.us),
        parts_us={part: round(us) for part, us in found.offload.parts_us.items()},
        stock_batch=found.stock.batch, stock_tokens_per_s=round(found.stock.tokens_per_s),
        speed_up=found.speed_up and round(found.speed_up, 2), wins_from=found.wins_from,
        wins_host_gib=wins and round(wins / GIB, 1),
    )  # fmt: skip


def table(found: list[rows.Row]) -> str:
    """Markdown of one device."""
    sizes = " | ".join(f"{host} GiB" for host in HOST_GIB)
    lines = [
        f"| model | context | stock | {sizes} | faster from |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (model, context), same in itertools.groupby(found, lambda r: (r["model"], r["context"])):
        of = list(same)
        cells = [f"{r['tokens_per_s']:,} ({r['batch']}), {r['speed_up'] or '-'}" for r in of]
        stock = f"{of[0]['stock_tokens_per_s']:,} ({of[0]['stock_batch']})"
        wins = (
            f"{of[-1]['wins_from']}, {of[-1]['wins_host_gib']} GiB" if of[-1]["wins_from"] else "-"
        )
        lines.append(f"| {model} | {context:,} | {stock} | {' | '.join(cells)} | {wins} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    options = parser.parse_args()
    writer = rows.Writer(options.out, rows.environment("predictions", ("sglang-scout",)))
    with tempfile.TemporaryDirectory() as scratch:
        for name in SHAPES:
            folder = write_config(name, Path(scratch) / name, CONTEXTS[-1])
            for context, gpu, host in itertools.product(CONTEXTS, DEVICES, HOST_GIB):
                add_row(writer, folder, name, context, gpu, host)
    writer.close()
    print(table([row for row in writer.rows if row["impl"] == "h100"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
