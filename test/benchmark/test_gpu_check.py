"""Parts of the GPU check that run without a device: checks in the interpreter, refusals, steps."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import op_calls
from benchmark import gpu_table, host_probe, rows
from benchmark.kernels import gpu_kernels
from benchmark.kernels.gpu_pools import Pools
from benchmark.server import gpu_server
from harness import wait_until
from sglang_scout.ops import triton

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "gpu_check.sh"

without_a_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(*command, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


@without_a_device
@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_every_kernel_has_a_case_and_equals_its_reference(monkeypatch, capsys):
    from triton.runtime.interpreter import GridExecutor

    launched, launch = set(), GridExecutor.__call__

    def noted(executor, *args, **kwargs):
        launched.add(executor.fn.__name__)
        return launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    shares = (argparse.Namespace(share=(i, 2)) for i in range(2))
    assert [gpu_kernels.check(share) for share in shares] == ["", ""]
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(": equal") for line in lines)
    of_the_ring = {"post_kernel", "merge_answer_kernel"}
    functions = {x.fn.__name__ for x in op_calls.kernels().values() if hasattr(x, "fn")}
    kernels = {name for name in functions if name.endswith("_kernel")}  # not of the device
    assert launched | of_the_ring == kernels and not launched & of_the_ring
    every = list(gpu_kernels.check_cases(Pools("cpu", pages=64, layers=2, heads=8)))
    assert len(lines) == len(every)
    # These depend on the number of heads, of which a device's check has more.
    assert [case.check() for case in every if case.op == "stage_pages"] == [""] * 2


@without_a_device
@pytest.mark.parametrize("module", ["ring.gpu_ring", "decode.gpu_decode"])
def test_the_ring_and_whole_steps_in_the_interpreter(module):
    command = [sys.executable, "-m", f"benchmark.{module}", "--check-only"]
    done = run(*command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *parts, last = done.stdout.splitlines()
    assert last == "equal" and all(": equal" in part for part in parts)


@without_a_device
def test_nothing_is_measured_without_a_device(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    done = run(sys.executable, "-m", "benchmark.decode.gpu_decode", "--out", out)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert gpu_server.main(["--out", str(out)]) == 2
    assert "no CUDA device: --device cpu runs the checks" in capsys.readouterr().err
    done = run(CHECK, tmp_path, "first", PYTHON=sys.executable)
    assert done.returncode == 2 and "gpu_check: no CUDA device (torch 2" in done.stderr
    assert "scripts/test.sh test/ops" in done.stderr and not list(tmp_path.iterdir())


def python_of(tmp_path, does):
    """A fake Python whose steps do ``does``."""
    python = tmp_path / "python"
    # "-": the device check; anything else is a step, or the table.
    python.write_text(
        f'#!/bin/sh\ncase "$1 $*" in "- "*) mkdir -p "$2"; cat >/dev/null ;; '
        f'*gpu_table*) exec {sys.executable} "$@" ;; *) {does} ;; esac\n'
    )
    python.chmod(0o755)
    return str(python)


def steps_of(tmp_path, does, call="first", **variables):
    """The check's status and output, and its steps, each of which does ``does``."""
    python = python_of(tmp_path, does)
    done = run(CHECK, tmp_path / "out", call, PYTHON=python, **variables)
    lines = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    return done, {row["step"]: row for row in map(json.loads, lines)}


FIRST = {"probe", "prewarm", "servers", "speed-rehearsal", "steps", "rehearsal", "ring"}
FIRST |= {f"kernels-{share}" for share in range(4)}


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
    shares = (line.split()[-1] for line in order if "begin" in line and "--share" in line)
    assert sorted(shares) == ["0/4", "1/4", "2/4", "3/4"]
    assert "for the second call: HOST_GB=96" in done.stdout
    *_, last = done.stdout.splitlines()
    assert last.startswith("step ring")


def test_figures_are_of_the_host_pages_that_were_asked_for(tmp_path):
    done, steps = steps_of(tmp_path, f'echo "$*" >>{tmp_path}/order', "figures", HOST_GB="64")
    assert done.returncode == 0 and list(steps) == ["prewarm", "decode", "speed", "kernels", "fp8"]
    order = (tmp_path / "order").read_text().splitlines()
    assert ["--host-gb 64" in line for line in order] == [False, True, True, False, True]


def test_a_step_gets_what_is_left_and_one_without_time_is_not_begun(tmp_path):
    only = {"ONLY": "kernels fp8"}
    done, steps = steps_of(tmp_path, ":", "figures", SECONDS_LIMIT="30", **only)
    assert done.returncode == 0 and 20 < steps["kernels"]["limit_s"] <= 30
    done, steps = steps_of(tmp_path, ":", "figures", SECONDS_LIMIT="9", **only)
    assert done.returncode == 1 and steps["fp8"]["skipped"] == "no time left"


@pytest.mark.parametrize(
    ("call", "step", "status", "failed"),
    [
        ("first", "servers", 3, True),
        ("first", "steps", 124, True),
        ("figures", "decode", 124, False),
        ("figures", "decode", 1, True),
    ],
)
def test_which_steps_fail_the_check(tmp_path, call, step, status, failed):
    done, steps = steps_of(tmp_path, f"exit {status}", call, ONLY=step)
    assert done.returncode == failed and steps[step]["exit_status"] == status
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"steps.jsonl", "logs.tar.gz"}


def test_a_step_that_there_is_not_fails_the_check(tmp_path):
    done, _ = steps_of(tmp_path, ":", ONLY="ring sever")
    assert done.returncode == 1 and "unknown step sever in first" in done.stdout
    assert run(CHECK, tmp_path / "out", "day-4").returncode == 64


def test_a_call_that_is_ended_ends_its_steps_and_still_prints_its_table(tmp_path):
    python = python_of(tmp_path, f"echo $$ >>{tmp_path}/pids; exec sleep 60")
    environment = os.environ | {"PYTHON": python, "ONLY": "servers kernels-1"}
    command = [CHECK, tmp_path / "out", "first"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as check:
        pids = tmp_path / "pids"
        wait_until("two begin", lambda: pids.exists() and pids.read_text().count("\n") > 1, 60)
        check.terminate()
        said = check.communicate(timeout=20)[0]
    assert check.returncode == 143 and "every figure is of this call" in said
    begun = [Path("/proc", pid) for pid in pids.read_text().split()]
    wait_until("no step outlives the call", lambda: not any(p.exists() for p in begun), 10)


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
    checks = {row["check"]: row for row in found if row["benchmark"] == "gpu_server"}
    assert set(checks) == ({"verify", "tokens", "state"} if call == "first" else set())
    assert call != "first" or checks["tokens"]["ties"] == 0 < checks["state"]["cpu_pages"]
    table = done.stdout.partition("every figure is of this call")[2]
    assert "SIMULATED: a host that holds 8 requests" in table and " x full" in table


@pytest.mark.parametrize(
    ("said", "refused", "host_gb"),
    [
        ("2.0 1\n118.0 20.0\n", False, 100.0),  # all that was asked for
        ("2.0 1\n60.0 12.5\n", False, 100.0),  # the time was over, and there may be more
        ("2.0 6.0\n4.0 13.0\n", False, 18.0),  # so slow that more would take too long
        ("2.0 1\n62.0 9.0\n", True, 44.0),  # no more is there
        ("", True, 1.0),
    ],
)
def test_how_much_to_ask_for_is_what_the_machine_gave(monkeypatch, said, refused, host_gb):
    grown = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(host_probe.subprocess, "run", lambda *command, **_: grown)
    writer = rows.Writer(None, rows.environment("host_probe"))
    assert host_probe.host_pages_gb(writer, 118.0, 12.0) == host_gb
    (row,) = writer.rows
    assert row["refused"] == refused and row["after"]["MemTotal"] > 1


def test_the_table_has_a_line_for_each_row_of_the_call_and_compares_rates(
    tmp_path, capsys, monkeypatch
):
    shared = rows.environment("gpu_decode") | {"device": "H100", "model": "m", "kv": "bfloat16"}
    writer = rows.Writer(tmp_path / "rows.jsonl", shared | {"context": 64})
    timed = rows.summary([1000.0, 1001.0])
    writer.add("full-ours", batch=2, tokens_per_s=100.0, bandwidth_share=0.9, **timed)
    writer.add("full-flashinfer", batch=2, tokens_per_s=80.0, bandwidth_share=0.7, **timed)
    ours = {"cpu_compute_ratio": 0.1, "wait_share": 0.02, "batch": 9, **timed}
    writer.add("scout", tokens_per_s=450.0, cache="device", **ours)
    writer.add("scout-simulated", tokens_per_s=900.0, simulated="a host", **ours)
    writer.add("scout", "failed", "out of memory", batch=9, untimed=True)
    writer.add("scout", tokens_per_s=1.0, **ours | {"time_utc": "2020-01-01T00:00:00"})
    writer.close()
    (tmp_path / "steps.jsonl").write_text(
        '{"time_utc": "2999", "step": "decode", "skipped": "no time left"}\n'
    )
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--since", "2026"])
    assert gpu_table.main() == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "H100: every figure is of this call" and len(lines) == 6
    shown = "\n".join(lines)
    assert "450 tok/s, 4.50 x full, cpu_compute_ratio 0.1, wait_share 0.02" in shown
    assert "9.00 x full" in shown and "SIMULATED: a host" in shown
    assert "FAILED: out of memory" in shown and "SKIPPED: no time left" in shown
