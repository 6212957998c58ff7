"""What of the GPU kit runs without a device: the checks in the interpreter, and the refusal."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmark" / "gpu_kernels.py"
BUNDLE_RUN = ROOT / "scripts" / "gpu_bundle_run.sh"
KERNELS = {
    "score_pages", "score_signs", "attend_pages", "select_pages",
    "build_layer_digests", "build_layer_signs",
    "copy_layer_pages", "append_tokens", "merge_states",
}  # fmt: skip

without_a_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(*command, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


@without_a_device
def test_every_case_equals_its_reference_in_the_interpreter():
    done = run(sys.executable, BENCHMARK, "--check-only", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == KERNELS
    assert all(line.endswith(": equal") for line in lines)


@without_a_device
@pytest.mark.parametrize("program", ["gpu_ring.py", "gpu_handover.py", "gpu_decode.py"])
def test_the_ring_and_whole_steps_in_the_interpreter(program):
    pytest.importorskip("sglang_scout._native")
    path = ROOT / "benchmark" / program
    done = run(sys.executable, path, "--check-only", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *parts, last = done.stdout.splitlines()
    assert last == "equal" and all(": equal" in part for part in parts)
    assert len(parts) == (4 if program == "gpu_decode.py" else 0)


@without_a_device
@pytest.mark.parametrize(
    "name",
    [
        "gpu_kernels.py",
        "gpu_ring.py",
        "gpu_handover.py",
        "gpu_decode.py",
        "gpu_rivals.py",
        "gpu_server.py",
    ],
)
def test_benchmarks_refuse_to_measure_without_a_device(tmp_path, name):
    done = run(sys.executable, ROOT / "benchmark" / name, "--out", tmp_path / "rows.jsonl")
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert not (tmp_path / "rows.jsonl").exists()


@without_a_device
def test_gpu_check_refuses_without_a_device_and_says_what_to_do(tmp_path):
    done = run(ROOT / "scripts" / "gpu_check.sh", tmp_path / "out", PYTHON=sys.executable)
    assert done.returncode == 2
    assert "gpu_check: no CUDA device (torch 2" in done.stderr
    assert "scripts/test.sh test/ops" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_gpu_check_without_a_folder_explains_itself():
    done = run(ROOT / "scripts" / "gpu_check.sh")
    assert done.returncode == 64
    assert "scripts/gpu_check.sh OUTDIR" in done.stdout


def test_gpu_check_says_what_there_was_no_time_for(tmp_path):
    """A step that ends with the time has not failed, and the later ones have rows too."""
    python = tmp_path / "python"
    # "-": the look for a device; "-c": what is installed; anything else is a step.
    python.write_text(
        '#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) exec sleep 60 ;; esac\n'
    )
    python.chmod(0o755)
    done = run(
        ROOT / "scripts" / "gpu_check.sh", tmp_path / "out", PYTHON=python, SECONDS_LIMIT="11"
    )
    assert done.returncode == 1 and "no step ran to its end" in done.stdout, done.stderr
    lines = (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines()
    steps = {row["step"]: row for row in map(json.loads, lines)}
    assert steps["small-sizes"]["seconds"] >= 10
    assert {"server", "tests", "benchmark", "decode", "rivals"} <= set(steps)
    for step in steps.keys() - {"memcheck", "racecheck"}:  # for which the sanitizer may be absent
        assert steps[step]["skipped"].startswith("no time left")


def test_gpu_check_fails_with_a_step_that_fails(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) exit 3 ;; esac\n')
    python.chmod(0o755)
    check = ROOT / "scripts" / "gpu_check.sh"
    done = run(check, tmp_path / "out", PYTHON=python, ONLY="server ring")
    assert done.returncode == 1 and "server FAILED with status 3" in done.stdout


def test_gpu_check_knows_the_names_of_its_steps(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) exit 0 ;; esac\n')
    python.chmod(0o755)
    done = run(
        ROOT / "scripts" / "gpu_check.sh", tmp_path / "out", PYTHON=python, ONLY="ring sever"
    )
    assert done.returncode == 1 and "there is no step sever" in done.stdout
    assert "gpu_check: ring\n" in done.stdout


def test_gpu_check_begins_nothing_that_it_could_not_end(tmp_path):
    """A server that has time to start, and for nothing else, tells nothing."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) exit 0 ;; esac\n')
    python.chmod(0o755)
    check = ROOT / "scripts" / "gpu_check.sh"
    only = {"PYTHON": python, "ONLY": "server resources"}
    for limit_s, begun in ((230, {"resources"}), (260, {"server", "resources"})):
        out = tmp_path / str(limit_s)
        done = run(check, out, **only, SECONDS_LIMIT=str(limit_s))
        assert done.returncode == ("server" not in begun), done.stdout + done.stderr
        lines = (out / "gpu_check.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert {row["step"] for row in found if "exit_status" in row} == begun


def test_gpu_check_tells_a_program_how_long_it_may_take(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) echo "$*" | sed "s/.*--seconds //" ;; esac\n'
    )
    python.chmod(0o755)
    said = {}
    for limit_s in ("570", "300"):
        only = {"PYTHON": python, "ONLY": "server decode", "SECONDS_LIMIT": limit_s}
        run(ROOT / "scripts" / "gpu_check.sh", tmp_path / "out", **only)
        said[limit_s] = [
            int((tmp_path / "out" / f"{step}.log").read_text()) for step in ("server", "decode")
        ]
    assert said["570"] == [520, 440]
    assert 260 <= said["300"][0] <= 280 and 180 <= said["300"][1] <= 200


def without_native(tmp_path, **variables):
    """Runs the steps, none of which does anything, where the native module is absent."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in -) cat >/dev/null ;; *_native*) exit 1 ;; *) exit 0 ;; esac\n'
    )
    python.chmod(0o755)
    done = run(ROOT / "scripts" / "gpu_check.sh", tmp_path / "out", PYTHON=python, **variables)
    lines = (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines()
    return done, [json.loads(line) for line in lines]


@pytest.mark.parametrize("only", ["speed", "small-sizes speed"])
def test_gpu_check_fails_where_a_step_that_was_asked_for_is_skipped(tmp_path, only):
    done, found = without_native(tmp_path, ONLY=only)
    assert done.returncode == 1 and "gpu_check: FAILED" in done.stdout
    assert f"{only.count(' ')} steps ran, 1 were skipped" in done.stdout
    assert "native module" in found[-1]["skipped"]


def test_a_bundle_knows_which_steps_need_the_native_module(tmp_path):
    _, found = without_native(tmp_path)
    skipped = {row["step"] for row in found if "native module" in row.get("skipped", "")}
    said = re.search(r'case "\$name" in (.*)\)$', BUNDLE_RUN.read_text(), re.MULTILINE)
    assert set(said[1].split(" | ")) == skipped


def test_rows_of_gpu_check_lie_behind_each_other_where_they_shall(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) echo "$*" ;; esac\n')
    python.chmod(0o755)
    rows_folder = tmp_path / "rows"
    check = ROOT / "scripts" / "gpu_check.sh"
    done = [
        run(check, tmp_path / f"out{i}", PYTHON=python, ONLY="ring speed", ROWS=rows_folder)
        for i in range(2)
    ]
    assert [x.returncode for x in done] == [0, 0]
    assert [path.name for path in rows_folder.iterdir()] == ["gpu_check.jsonl"]
    lines = (rows_folder / "gpu_check.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == ["ring", "speed"] * 2
    assert f"--out {rows_folder}/gpu_parts.jsonl" in (tmp_path / "out1" / "ring.log").read_text()
    said = (tmp_path / "out1" / "speed.log").read_text()
    assert f"--out {rows_folder}/gpu_speed.jsonl --logs {tmp_path}/out1" in said


def test_all_calls_together_leave_few_files_of_rows():
    text = (ROOT / "scripts" / "gpu_check.sh").read_text()
    assert (
        len(set(re.findall(r"\$ROWS/(\w+\.jsonl)", text))) <= 6
    )  # beside more.tar.gz and its next


@pytest.mark.parametrize(("tool", "failed"), [("memcheck", True), ("racecheck", False)])
def test_gpu_check_takes_hazards_as_information(tmp_path, tool, failed):
    python, sanitizer = tmp_path / "python", tmp_path / "compute-sanitizer"
    python.write_text('#!/bin/sh\n[ "$1" != - ] || cat >/dev/null\n')
    sanitizer.write_text("#!/bin/sh\nexit 9\n")
    for path in (python, sanitizer):
        path.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    check = ROOT / "scripts" / "gpu_check.sh"
    done = run(check, tmp_path / "out", PYTHON=python, PATH=path, ONLY=tool)
    assert done.returncode == failed, done.stdout
    [row] = map(json.loads, (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines())
    assert row["exit_status"] == 9 and row.get("information", False) is not failed


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_sanitizer_that_does_not_know_the_device_is_no_finding(tmp_path, tool):
    python, sanitizer = tmp_path / "python", tmp_path / "compute-sanitizer"
    python.write_text('#!/bin/sh\n[ "$1" != - ] || cat >/dev/null\n')
    said = '========= Error: Device not supported. See the "Supported Devices" section'
    sanitizer.write_text(f"#!/bin/sh\necho '{said}'\nexit 1\n")
    for path in (python, sanitizer):
        path.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    check = ROOT / "scripts" / "gpu_check.sh"
    run(check, tmp_path / "out", PYTHON=python, PATH=path, ONLY=tool)
    [row] = map(json.loads, (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines())
    assert "Device not supported" in row["skipped"] and "exit_status" not in row


def test_tests_on_a_device_never_choose_the_interpreter(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$1" in -) cat >/dev/null ;; -c) ;; *) echo "interpret: $TRITON_INTERPRET" ;; esac\n'
    )
    python.chmod(0o755)
    check = ROOT / "scripts" / "gpu_check.sh"
    done = run(check, tmp_path / "out", PYTHON=python, ONLY="tests", TRITON_INTERPRET="1")
    assert done.returncode == 0 and (tmp_path / "out" / "tests.log").read_text() == "interpret: 0\n"
    # What the tests do with it, also where nothing says that there is a device.
    code = (
        "import importlib.util as u, os, sys\n"
        "os.path.exists = lambda path, exists=os.path.exists: 'nvidiactl' not in path and exists(path)\n"
        f"spec = u.spec_from_file_location('conftest', {str(ROOT / 'test' / 'conftest.py')!r})\n"
        "spec.loader.exec_module(u.module_from_spec(spec))\n"
        "from sglang_scout.ops import triton\n"
        "print(triton.interpreted())"
    )
    for value, interpreted in (("0", "False"), ("1", "True")):
        done = run(sys.executable, "-c", code, TRITON_INTERPRET=value)
        assert done.stdout == f"{interpreted}\n", done.stderr


def test_the_calls_of_the_documents_give_every_step_its_time():
    text = (ROOT / "scripts" / "gpu_check.sh").read_text()
    steps = re.findall(r"^ *(?:\S.* )?(?:step|information) ([a-z]\S+) (\d+)", text, re.MULTILINE)
    limit_s = {name: int(limit) for name, limit in steps}
    calls = re.findall(
        r"^ONLY=(?:\"([^\"]+)\"|(\w+)) ", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE
    )
    named = [(several or one).split() for several, one in calls]
    assert sorted(step for call in named for step in call) == sorted(limit_s)
    # The first call unpacks and builds, all look for a device.
    for preparation_s, call in zip([60, *[15] * len(named)], named, strict=False):
        assert preparation_s + sum(limit_s[step] for step in call) <= 570, call


def test_the_plan_of_the_documents_fits_thirty_minutes():
    text = (ROOT / "docs" / "gpu.md").read_text()
    calls = re.findall(r"^SECONDS_LIMIT=(\d+) ONLY=(?:\"([^\"]+)\"|(\w+)) ", text, re.MULTILINE)
    check = (ROOT / "scripts" / "gpu_check.sh").read_text()
    least = {name: int(s) for name, s in re.findall(r"step (\S+) \d+:(\d+)", check)}
    limits = [int(limit) for limit, _, _ in calls]
    assert len(calls) == 4 and max(limits) <= 560
    for limit, (_, several, one) in zip(limits, calls, strict=True):
        assert limit - 20 >= sum(least.get(step, 10) for step in (several or one).split())
    # With half a minute for each call's beginning and end.
    assert sum(limits) + 30 * len(calls) + 40 <= 1800
