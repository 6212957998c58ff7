"""The systems of five papers on the same questions, texts and budgets, each on real servers.

    .venv/bin/python scripts/train_forecast.py && .venv/bin/python scripts/train_forecast.py --kind pilot
    python -m benchmark.systems.run --model smollm2 --json docs/results/systems_smollm2.jsonl
    python -m benchmark.systems.run --model recall --json docs/results/systems_recall.jsonl
    python -m benchmark.systems.table docs/results/systems_*.jsonl

Rerunning the command resumes where it stopped. Rows are those of benchmark/accuracy/suite.py. Settings of each
system: benchmark/accuracy/policies.py. Plain text, without servers: `benchmark.accuracy.study.run --set systems`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark.accuracy.gate import FULL_SETTING, ask_full
from benchmark.accuracy.policies import SYSTEMS, grid
from benchmark.accuracy.suite import lacks, run_settings, suite_arguments, suite_file
from benchmark.progress import Progress
from servers.server_process import ends_orderly

OURS = ("scout-rotated", "scout")
QUESTIONS = {"smollm2": "planted", "recall": "tasks"}
CONFIG = {"smollm2": {}, "recall": {"exact_layers": [1]}}
"""For all policies that predict queries: predictions are uninformative in layer 1 of the retrieval model."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=QUESTIONS, default="smollm2")
    add("--json", type=Path, required=True, metavar="FILE", help="write one row per line to FILE")
    add("--policies", nargs="+", default=[*OURS, *SYSTEMS], help="see accuracy/policies.py")
    add("--budgets", nargs="+", type=int, default=[512], metavar="TOKENS")
    add("--lengths", nargs="+", type=int, default=[4096], metavar="TOKENS")
    add("--samples", type=int, default=12, help="samples per length and task")
    add("--at-once", type=int, default=2, metavar="SERVERS", help="settings that run concurrently")
    given = parser.parse_args(argv)
    args = suite_arguments(
        ["--samples", str(given.samples), "--at-once", str(given.at_once)],
        json=given.json,
        questions=QUESTIONS[given.model],
        lengths=given.lengths,
        config={"resident_tokens": 32, **CONFIG[given.model]},
    )
    settings = grid(given.policies, given.budgets)
    file, progress = suite_file(args), Progress()
    with ends_orderly():
        if lacks(file, args, FULL_SETTING):
            ask_full(args, file, progress)
        run_settings(args, settings, file, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
