"""The whole comparison of the papers' systems: weights, plain text, servers, a table.

    python -m benchmark.systems [--documents 3]     hours; rerunning the command resumes where it stopped

Each part is described in the module or script that it runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("docs/results")


def parts(documents: int) -> list[list[str]]:
    """Command lines, in order."""
    train = "scripts/train_forecast.py"
    weights = [
        ["--out", f".cache/weights/smollm2-135m-{kind}.npz", "--kind", kind]
        for kind in ("forecast", "pilot")
    ]
    servers = {model: str(RESULTS / f"systems_{model}.jsonl") for model in ("smollm2", "recall")}
    study = ["--set", "systems", "--documents", str(documents), "--parts", "facts", "text"]
    return [
        *([train, *kind] for kind in weights if not (ROOT / kind[1]).is_file()),
        [
            "-m",
            "benchmark.accuracy.study.run",
            *study,
            "--json",
            str(RESULTS / "study_systems.jsonl"),
        ],
        *(["-m", "benchmark.systems.run", "--model", m, "--json", f] for m, f in servers.items()),
        ["-m", "benchmark.systems.table", *servers.values()],
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--documents", type=int, default=3, help="documents of plain text and of planted facts"
    )
    for command in parts(parser.parse_args(argv).documents):
        print("$", *command, flush=True)
        if status := subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
