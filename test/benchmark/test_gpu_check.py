"""Parts of the GPU check that run without a device: checks in the interpreter, refusals, steps."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmark import rows
from benchmark.kernels import gpu_kernels
from benchmark.kernels.gpu_cases import Pools, cases
from benchmark.server import gpu_server, speed
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
    done = run(CHECK, tmp_path / "out", "first", PYTHON=sys.executable)
    assert done.returncode == 2 and "gpu_check: no CUDA device (torch 2" in done.stderr
    assert "scripts/test.sh test/ops" in done.stderr and list((tmp_path / "out").iterdir()) == []


def steps_of(tmp_path, does, call="first", **variables):
    """The check's status and output, and its steps, with a fake Python whose steps do ``does``."""
    python = tmp_path / "python"
    # "-": the device check; anything else is a step, or the table.
    python.write_text(
        f'#!/bin/sh\ncase "$1 $*" in "- "*) mkdir -p "$2"; cat >/dev/null ;; '
        f'*gpu_table*) exec {sys.executable} "$@" ;; *) {does} ;; esac\n'
    )
    python.chmod(0o755)
    done = run(CHECK, tmp_path / "out", call, PYTHON=python, **variables)
    lines = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    return done, {row["step"]: row for row in map(json.loads, lines)}


FIRST = {"probe", "prewarm", "servers", "speed-rehearsal", "kernels-0", "kernels-1", "kernels-2", "kernels-3",
         "steps", "rehearsal", "ring"}  # fmt: skip


def test_the_first_call_checks_side_by_side_and_measures_the_ring_alone(tmp_path):
    does = (
        f'echo "begin $*" >>{tmp_path}/order; sleep 0.3; echo "end $*" >>{tmp_path}/order; echo 96'
    )
    done, steps = steps_of(tmp_path, does)
    assert done.returncode == 0 and set(steps) == FIRST, done.stdout
    order = (tmp_path / "order").read_text().splitlines()
    assert "host_probe" in order[0] and "host_probe" in order[1]
    assert "gpu_ring" in order[-2] and "gpu_ring" in order[-1]
    begun = [line.split()[0] for line in order[2:7]]
    assert begun == ["begin"] * 5, "four shares of the kernels, and what servers need"
    shares = sorted(
        line.rpartition(" ")[2] for line in order if "begin" in line and "--share" in line
    )
    assert shares == ["0/4", "1/4", "2/4", "3/4"]
    assert "for the second call: HOST_GB=96" in done.stdout
    *_, last = done.stdout.splitlines()
    assert last.startswith("step ring")


def test_figures_are_of_the_host_pages_that_were_asked_for(tmp_path):
    done, steps = steps_of(tmp_path, f'echo "$*" >>{tmp_path}/order', "figures", HOST_GB="64")
    assert done.returncode == 0 and list(steps) == ["prewarm", "decode", "speed", "kernels", "fp8"]
    order = (tmp_path / "order").read_text().splitlines()
    assert ["--host-gb 64" in line for line in order] == [False, True, True, False, True]


def test_a_call_ends_with_its_time_and_says_what_it_did_not_come_to(tmp_path):
    limits = {"SECONDS_LIMIT": "11", "ONLY": "kernels fp8"}
    done, steps = steps_of(tmp_path, "exec sleep 60", "figures", **limits)
    assert steps["kernels"]["exit_status"] == 124 and steps["kernels"]["seconds"] <= 13
    assert done.returncode == 1 and steps["fp8"]["skipped"] == "no time left"


@pytest.mark.parametrize(
    ("call", "step", "status", "failed"),
    [("first", "servers", 3, True), ("first", "steps", 124, True), ("figures", "decode", 124, False),
     ("figures", "decode", 1, True), ("first", "ring", 0, False)],
)  # fmt: skip
def test_which_steps_fail_the_check(tmp_path, call, step, status, failed):
    done, steps = steps_of(tmp_path, f"exit {status}", call, ONLY=step)
    assert done.returncode == failed and steps[step]["exit_status"] == status
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"steps.jsonl", "logs.tar.gz"}


def test_a_step_that_there_is_not_fails_the_check(tmp_path):
    done, _ = steps_of(tmp_path, ":", ONLY="ring sever")
    assert done.returncode == 1 and "no step sever in first" in done.stdout
    assert run(CHECK, tmp_path / "out", "day-4").returncode == 64


def test_a_call_that_is_ended_ends_its_steps_and_still_prints_its_table(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "- "*) cat >/dev/null ;; *gpu_table*) exec {sys.executable} "$@" ;; '
        f"*) echo $$ >>{tmp_path}/pids; exec sleep 60 ;; esac\n"
    )
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "ONLY": "servers kernels-1"}
    command = [CHECK, tmp_path / "out", "first"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as check:
        pids = tmp_path / "pids"
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.05)
        check.terminate()
        said = check.communicate(timeout=20)[0]
    assert check.returncode == 143 and "every figure is of this call" in said
    deadline = time.monotonic() + 10
    while (
        left := [p for p in pids.read_text().split() if Path(f"/proc/{p}").exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "a step outlived the call"


def test_time_limits_agree_with_each_other():
    text = CHECK.read_text()
    limits = {name: int(s) for name, s in re.findall(r"benchmark ([\w-]+) (\d+) ", text)}
    answers = len(gpu_server.parse(["--out", "x"]).batch)
    assert gpu_server.START_S["cuda"] + answers * 10 <= limits["servers"], "both start at once"
    calls = dict(re.findall(r"2:(\w+)\) LIMIT_S=(\d+)", text))
    assert calls == {"first": "230", "figures": "440"}
    # What must not be cut by what runs before it.
    reserved = int(re.findall(r"RESERVED_S=(\d+) #", text)[0])
    assert (
        limits["probe"] + max(limits["servers"] + limits["prewarm"], limits["steps"])
        <= 230 - reserved + 10
    )
    assert limits["decode"] + limits["speed"] <= 440 - 20, "preparation"
    host_gb = 100
    both = speed.start_s("stock", host_gb) + speed.start_s("scout", host_gb)
    assert speed.start_s("scout", host_gb) < limits["speed"] <= both


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call", ["first", "figures"])
def test_both_calls_in_the_interpreter(tmp_path, call):
    done = run(CHECK, tmp_path, call, PYTHON=sys.executable, REHEARSE="1", SECONDS_LIMIT="800")
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows.read_rows(tmp_path / "rows.jsonl")
    kinds = {row["impl"] for row in found if row["benchmark"] == "gpu_decode"}
    assert kinds == {"full-flashinfer", "full-ours", "scout", "scout-simulated"}
    assert all(row["rehearsal"] for row in found if row["benchmark"] == "gpu_decode")
    table = done.stdout.partition("every figure is of this call")[2]
    assert "SIMULATED: a host that holds 8 requests" in table and " x full" in table
