"""The program that checks a decode server on a CUDA device passes on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_check_passes_with_interpreted_kernels(tmp_path):
    out = tmp_path / "rows.jsonl"
    program = [sys.executable, "-m", "benchmark.server.gpu_server", "--out", out, "--device", "cpu"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["check"]: row for row in rows.read_rows(out)}
    assert set(found) == {"verify", "tokens", "state"}
    assert all(row["status"] == "ok" for row in found.values())
    assert found["tokens"]["ties"] == 0
    assert found["verify"]["checks"] > 0 and found["state"]["cpu_pages"] > 0
