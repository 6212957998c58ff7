"""Parts of the GPU check that run without a device: checks in the interpreter, refusals, steps."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark.kernels import gpu_kernels
from benchmark.kernels.gpu_cases import Pools, cases
from sglang_scout.ops import triton

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "gpu_check.sh"

without_a_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(*command, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def kernels():
    """Names of the package's Triton kernels, without their device functions."""
    modules = (
        importlib.import_module(f"{triton.__name__}.{m.name}")
        for m in pkgutil.iter_modules(triton.__path__)
    )
    functions = (x for module in modules for x in vars(module).values() if hasattr(x, "fn"))
    return {x.fn.__name__ for x in functions if x.fn.__name__.endswith("_kernel")}


@without_a_device
@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_every_kernel_has_a_case_and_equals_its_reference(monkeypatch, capsys):
    from triton.runtime.interpreter import GridExecutor

    launched, launch = set(), GridExecutor.__call__

    def noted(executor, *args, **kwargs):
        launched.add(executor.fn.__name__)
        return launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    assert gpu_kernels.check("cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(
        line.endswith((": equal", "absent, k is on cpu; flash supports cuda")) for line in lines
    )
    of_the_ring = {"post_kernel", "merge_answer_kernel"}
    assert launched | of_the_ring == kernels() and not launched & of_the_ring
    for case in cases(Pools("cpu", pages=64, layers=2, heads=2), small=True):
        if not case.absent:
            case.calls[-1]()  # the timed calls run too


@without_a_device
@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_cases_that_depend_on_heads_equal_theirs_with_as_many_as_on_a_device():
    of_heads = [
        case
        for case in cases(Pools("cpu", pages=64, layers=2, heads=8), small=True)
        if case.op == "stage_pages"
    ]
    assert len(of_heads) == 2 and all(case.check() == "" for case in of_heads)


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
    """The check's status and output, and its rows, with a fake Python whose steps do ``does``."""
    python = tmp_path / "python"
    # "-": the device check; "-c": a step's requirements; anything else is a step.
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
    limits = dict(re.findall(r'^ *step (\S+) "?(\d+|\$LIMIT_S)"? ', text, re.MULTILINE))
    assert [day for day, _ in days] == ["day-1", "day-2", "day-3"]
    # 30 s are for the bundle. Two checks run while the server does.
    assert days[0][1].startswith("server kernels-check decode-check ")
    assert int(limits["kernels-check"]) + int(limits["decode-check"]) <= int(limits["server"])
    assert (
        sum(
            int(limits[x]) for x in days[0][1].split() if x not in ("kernels-check", "decode-check")
        )
        <= 360
    )
    for *steps, last in (steps.split() for _, steps in days[1:]):
        # The step with the remaining time has at least half of the call.
        assert sum(int(limits[step]) for step in steps) + 300 <= 540 and limits[last] == "$LIMIT_S"
    assert "ring-memcheck" in days[0][1]
    assert all(f"RESULTS {day}" in (ROOT / "docs" / "gpu.md").read_text() for day, _ in days)
    limit_s = int(re.findall(r"SECONDS_LIMIT:-(\d+)", text)[0])
    assert len(days) * (limit_s + 30) <= 1800


def test_checks_run_while_the_server_does_and_each_failure_counts(tmp_path):
    does = 'case "$*" in *gpu_server*) sleep 2; exit 5 ;; esac'
    done, steps = steps_of(tmp_path, does, ONLY="ring server kernels-check")
    assert list(steps) == ["kernels-check", "server", "ring"]
    assert done.returncode == 1 and steps["server"]["exit_status"] == 5
    assert "gpu_check: 3 steps ran" in done.stdout


def test_a_day_is_its_steps_and_no_other_word_is_taken(tmp_path):
    done, steps = steps_of(tmp_path, ":", "day-3")
    assert done.returncode == 0 and list(steps) == ["kernels", "decode"]
    assert run(CHECK, tmp_path / "out", "day-4").returncode == 64
