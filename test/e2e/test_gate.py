"""The short form of the accuracy gate, on real servers: scout answers as full attention does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARGIN_POINTS = 10.0


def test_scout_answers_as_full_attention_does(tmp_path):
    path = tmp_path / "gate.jsonl"
    gate = [sys.executable, str(ROOT / "benchmark" / "accuracy" / "gate.py"), "--short"]
    options = ["--margin-points", str(MARGIN_POINTS), "--json", str(path)]
    done = subprocess.run([*gate, *options], capture_output=True, text=True, timeout=800)
    assert path.exists(), f"{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    full = {row["task"]: row for row in rows if row["policy"] == "full"}
    scout = {row["task"]: row for row in rows if row["policy"] == "scout-signs"}
    assert len(full) == len(scout) == 7 and len(rows) == 14, done.stderr

    # What is compared means something: full attention knows the answers, read through the decode path; scout left
    # pages out, the worker computed some, and needles in filler are found.
    asked = sum(row["asked"] for row in full.values())
    right = sum(row["right"] for row in full.values())
    assert right > 0.9 * asked
    for row in scout.values():
        assert row["budget_tokens"] < row["length_tokens"]
        assert row["offload"]["cpu_pages"] > 0
    assert scout["needle"]["right"] == scout["needle"]["asked"]

    loss_points = 100 * (right - sum(row["right"] for row in scout.values())) / asked
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    verdict = [line for line in done.stdout.splitlines() if line.startswith("1024 ")]
    assert len(verdict) == 1 and verdict[0].endswith("pass")
    assert f"{loss_points:.2f} points" in verdict[0]
