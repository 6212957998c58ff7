"""The short form of the accuracy gate, on real servers: scout answers like full attention, with both models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.accuracy import gate
from benchmark.accuracy.questions import SOURCES
from benchmark.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]

# By model: points that may be lost, and the minimum share that full attention must answer. The language model gets four
# questions, so one lost answer fails.
MARGIN_POINTS = {"recall": 10.0, "smollm2": 12.5}
KNOWN_SHARE = {"recall": 0.9, "smollm2": 0.7}


# Together they exceed the three minutes of the short form.
@pytest.mark.parametrize("name", ["smollm2", pytest.param("recall", marks=pytest.mark.slow)])
def test_scout_answers_as_full_attention_does(name, tmp_path):
    judge, path = gate.JUDGES[name], tmp_path / "gate.jsonl"
    command = [sys.executable, "-m", "benchmark.accuracy.gate", "--short"]
    command += ["--models", name, "--margin-points", str(MARGIN_POINTS[name]), "--json", str(path)]
    # On all CPUs: a real model is large enough for that.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = read_rows(path)
    full, scout = ({r["task"]: r for r in rows if r["policy"] == x} for x in ("full", judge.policy))
    assert set(full) == set(scout) == set(SOURCES[judge.questions].tasks)

    # The comparison is meaningful: full attention knows the answers; scout left pages out, and the worker computed
    # some.
    asked, right = (sum(row[x] for row in full.values()) for x in ("asked", "right"))
    assert right > KNOWN_SHARE[name] * asked
    for row in scout.values():
        assert row["budget_tokens"] == judge.short.budgets[0] < row["length_tokens"]
        assert row["offload"]["cpu_pages"] > 0
    if name == "recall":
        assert scout["needle"]["right"] == scout["needle"]["asked"]
    loss_points = 100 * (right - sum(row["right"] for row in scout.values())) / asked
    [verdict] = [line for line in done.stdout.splitlines() if line.endswith("pass")]
    assert verdict.startswith(f"{judge.policy}-") and f"{loss_points:.2f} points" in verdict
