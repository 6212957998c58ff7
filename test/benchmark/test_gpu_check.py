"""What of the GPU check runs without a device: the checks in the interpreter, the refusals, the steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "gpu_check.sh"

without_a_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(*command, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


@without_a_device
def test_every_case_equals_its_reference_in_the_interpreter():
    done = run(
        sys.executable, "-m", "benchmark.kernels.gpu_kernels", "--check-only", TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12 and all(line.endswith(": equal") for line in lines)


@without_a_device
@pytest.mark.parametrize("module", ["ring.gpu_ring", "decode.gpu_decode"])
def test_the_ring_and_whole_steps_in_the_interpreter(module):
    pytest.importorskip("sglang_scout._native")
    done = run(
        sys.executable, "-m", f"benchmark.{module}", "--check-only", TRITON_INTERPRET="1"
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *parts, last = done.stdout.splitlines()
    assert last == "equal" and all(": equal" in part for part in parts)


@without_a_device
@pytest.mark.parametrize("module", ["decode.gpu_decode", "server.gpu_server"])
def test_benchmarks_refuse_to_measure_without_a_device(tmp_path, module):
    done = run(sys.executable, "-m", f"benchmark.{module}", "--out", tmp_path / "rows.jsonl")
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not (tmp_path / "rows.jsonl").exists()


@without_a_device
def test_the_check_refuses_without_a_device_and_says_what_to_do(tmp_path):
    done = run(CHECK, tmp_path / "out", PYTHON=sys.executable)
    assert done.returncode == 2 and "gpu_check: no CUDA device (torch 2" in done.stderr
    assert "scripts/test.sh test/ops" in done.stderr and list((tmp_path / "out").iterdir()) == []


def steps_of(tmp_path, does, *day, **variables):
    """The check's status and words, and its rows, with a Python of which a step ``does`` this."""
    python = tmp_path / "python"
    # "-": the look for a device; "-c": what a step needs; anything else is a step.
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -) mkdir -p "$2"; cat >/dev/null ;; -c) {variables.pop("needs", ":")} ;; '
        f"*) {does} ;; esac\n"
    )
    python.chmod(0o755)
    done = run(CHECK, tmp_path / "out", *day, PYTHON=python, **variables)
    lines = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    return done, {row["step"]: row for row in map(json.loads, lines)}


def test_a_call_ends_with_its_time_and_says_what_it_did_not_come_to(tmp_path):
    done, steps = steps_of(tmp_path, "exec sleep 60", SECONDS_LIMIT="11", ONLY="decode speed ring")
    assert steps["ring"]["exit_status"] == 124 and steps["ring"]["seconds"] <= 13
    assert done.returncode == 1 and steps["decode"]["skipped"] == "no time left"


@pytest.mark.parametrize(
    ("step", "status", "failed"),
    [("server", 3, True), ("decode", 124, False), ("flashinfer", 1, False), ("ring", 0, False)],
)
def test_which_steps_fail_the_check(tmp_path, step, status, failed):
    done, steps = steps_of(tmp_path, f"exit {status}", ONLY=step)
    assert done.returncode == failed and steps[step]["exit_status"] == status
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"steps.jsonl", "logs.tar.gz"}


def test_a_step_that_was_asked_for_and_cannot_run_fails_the_check(tmp_path):
    needs = 'case "$2" in *_native*) exit 1 ;; esac'
    done, steps = steps_of(tmp_path, ":", needs=needs, ONLY="speed kernels")
    assert done.returncode == 1 and "_native" in steps["speed"]["skipped"]
    assert steps["kernels"]["exit_status"] == 0
    done, _ = steps_of(tmp_path, ":", ONLY="ring sever")
    assert done.returncode == 1 and "there is no step sever" in done.stdout


def test_the_days_fit_half_an_hour_and_name_steps_that_there_are():
    text = CHECK.read_text()
    days = re.findall(r'2:(day-\d)\) ONLY="([\w -]+)"', text)
    known = set(re.findall(r"^step (\S+) \d+ ", text, re.MULTILINE))
    assert [day for day, _ in days] == ["day-1", "day-2", "day-3"]
    assert {step for _, steps in days for step in steps.split()} <= known
    assert all(f"RESULTS {day}" in (ROOT / "docs" / "gpu.md").read_text() for day, _ in days)
    limit_s = int(re.findall(r"SECONDS_LIMIT:-(\d+)", text)[0])
    assert len(days) * (limit_s + 30) <= 1800


def test_a_day_is_its_steps_and_no_other_word_is_taken(tmp_path):
    done, steps = steps_of(tmp_path, ":", "day-3")
    assert done.returncode == 0 and list(steps) == ["decode", "kernels"]
    assert run(CHECK, tmp_path / "out", "day-4").returncode == 64
