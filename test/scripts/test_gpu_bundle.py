"""Packing a bundle (scripts/gpu_bundle.sh), and the ``run.sh`` of a small one, with a Python that claims a device."""

import io
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHECK = """#!/usr/bin/env bash
touch "$1/step.log"
mkdir -p "$TRITON_CACHE_DIR"
touch "$TRITON_CACHE_DIR/kernel"
echo "$BENCHMARK_COMMIT $((SECONDS_LIMIT > 40 && SECONDS_LIMIT <= 99))" >>"$ROWS/rows.jsonl"
after_step
[ -z "$LONG" ] || { touch "$LONG"; sleep 60 & trap 'kill "$!"; exit 143' TERM; wait; }
exit {status}
"""
# Has torch, a device and pip, whatever the real one has. Writes down what it is asked for.
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
*"import sys, torch"*) echo "$VERSION"; exit "$NO_DEVICE" ;;
*"import nanobind"*) exit "$NO_NANOBIND" ;;
*--target*/built*)
    for tree; do :; done
    # As CMake, which remembers what it found.
    [ "$NO_COMPILER" = 0 ] || { mkdir -p "$tree/build/cache"; }
    [ ! -e "$tree/build/cache" ] || { echo "no compiler"; exit 1; }
    built="$(dirname "$tree")/built"
    mkdir -p "$built/sglang_scout" "$built/sglang_scout-0.dist-info"
    touch "$built/sglang_scout/_native.so" ;;
*"pip install"*) ;;
*) exec "$REAL" "$@" ;;
esac
"""


def pack(path, files):
    with tarfile.open(path, "w:" + path.suffix[1:]) as archive:
        for name, text in files.items():
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(text), 0o755
            archive.addfile(about, io.BytesIO(text.encode()))


class Bundle:
    """A bundle, and what its run.sh finds around it."""

    def __init__(self, folder):
        self.folder, self.here = folder, folder / "bundle"
        self.work = folder / "scout-work-0123abc-dirty"
        self.asked = ""
        (self.here / "wheels").mkdir(parents=True)
        for name in ("no_such_package", "pytest"):
            (self.here / "wheels" / f"{name}-1-py3-none-any.whl").touch()
        (self.here / "commit").write_text("0123abc-dirty\n")
        self.needs(python=platform.python_version(), torch=version("torch"))
        pack(self.here / "site.tar.xz", {"carried.py": "x = 1\n"})
        self.pack_tree(status=0)
        shutil.copy(ROOT / "scripts" / "gpu_bundle_run.sh", self.here / "run.sh")
        python = folder / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)

    def needs(self, **versions):
        lines = [f"{name} {needed}\n" for name, needed in versions.items()]
        (self.here / "needs").write_text("".join(lines))

    def pack_tree(self, status):
        check = CHECK.replace("{status}", str(status))
        files = {"scripts/gpu_check.sh": check, "python/sglang_scout/__init__.py": ""}
        pack(self.here / "tree.tar.gz", files)

    def run(self, **variables):
        started = self.start(**variables)
        said, _ = started.communicate()
        self.asked = (self.folder / "calls").read_text()
        return started.returncode, said

    def start(self, **variables):
        calls = self.folder / "calls"
        calls.write_text("")
        variables = {
            "NO_DEVICE": "0", "NO_NANOBIND": "0", "NO_COMPILER": "0", "VERSION": "3.12", "LONG": "",
            **variables, "PYTHON": str(self.folder / "python"), "REAL": sys.executable,
            "CALLS": str(calls), "TMPDIR": str(self.folder), "SECONDS_LIMIT": "99",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", self.here / "run.sh", self.folder / "results"],
            env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def logs(self):
        """Names of the logs in the archive, without the folder of their call."""
        with tarfile.open(self.folder / "results" / "more.tar.gz") as more:
            return sorted(Path(x.name).name for x in more if x.isfile())


@pytest.fixture
def bundle(tmp_path):
    return Bundle(tmp_path)


def test_the_first_call_makes_what_the_steps_need(bundle):
    status, said = bundle.run()
    assert status == 0, said
    assert "made in" in said and "no native module" not in said
    assert (bundle.work / "tree" / "python" / "sglang_scout" / "_native.so").exists()
    assert (bundle.work / "site" / "sglang_scout-0.dist-info").is_dir()
    assert list((bundle.work / "site" / "__pycache__").glob("carried.*.pyc"))
    installed = next(x for x in bundle.asked.splitlines() if "--no-compile" in x)
    assert "no_such_package" in installed and "/pytest-1-py3" not in installed
    results = bundle.folder / "results"
    assert (results / "rows.jsonl").read_text() == "0123abc-dirty 1\n"
    assert bundle.logs() == ["native.log", "step.log"]


def test_a_later_call_begins_with_the_steps(bundle):
    bundle.run()
    status, said = bundle.run()
    assert status == 0 and "is ready" in said
    assert "pip" not in bundle.asked and "compileall" not in bundle.asked
    assert (bundle.folder / "scout-kept" / "triton" / "kernel").exists()


def test_rows_and_logs_of_earlier_calls_stay(bundle):
    bundle.run()
    time.sleep(1)  # a call's folder is named by the second
    bundle.pack_tree(status=3)  # so that all is made anew
    bundle.run()
    results = bundle.folder / "results"
    assert (results / "rows.jsonl").read_text() == "0123abc-dirty 1\n" * 2
    assert bundle.logs() == ["native.log", "native.log", "step.log", "step.log"]
    assert len(list(results.iterdir())) == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_ended_has_left_its_rows_and_logs(bundle, how):
    begun = bundle.folder / "begun"
    started = bundle.start(LONG=str(begun))
    while not begun.exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(how)
    assert started.wait(30) == (143 if how == signal.SIGTERM else -how)
    assert (bundle.folder / "results" / "rows.jsonl").read_text() == "0123abc-dirty 1\n"
    assert bundle.logs() == ["native.log", "step.log"]


def test_the_status_is_that_of_the_steps(bundle):
    bundle.pack_tree(status=3)
    assert bundle.run()[0] == 3


@pytest.mark.parametrize("other", ["tree", "python", "cut short"])
def test_what_does_not_belong_to_this_bundle_is_made_anew(bundle, other):
    bundle.run()
    if other == "tree":
        bundle.pack_tree(status=3)
    elif other == "cut short":
        (bundle.work / "ready").unlink()
    stale = bundle.work / "site" / "stale.py"
    stale.touch()
    status, said = bundle.run(VERSION="3.13" if other == "python" else "3.12")
    assert "made in" in said and not stale.exists()
    assert status == (3 if other == "tree" else 0)


def test_a_build_that_fails_is_tried_again(bundle):
    status, said = bundle.run(NO_COMPILER="1")
    assert status == 0 and "no native module" in said and "no compiler" in said
    kept = bundle.work / "site" / "kept.py"
    kept.touch()
    said = bundle.run()[1]
    assert "no native module" not in said and "is ready" in said
    assert kept.exists() and "--no-compile" not in bundle.asked, "nothing else is made anew"
    bundle.run()
    assert "--target" not in bundle.asked, "what was built is not built again"


@pytest.mark.parametrize(("only", "ends"), [("tests decode", True), ("tests", False)])
def test_a_call_for_what_cannot_run_without_the_native_module_ends_at_once(bundle, only, ends):
    status, said = bundle.run(NO_COMPILER="1", ONLY=only)
    assert status == ends and "no compiler" in said
    assert (bundle.folder / "results" / "rows.jsonl").exists() != ends


def test_where_nothing_can_be_built_nothing_is_tried_again(bundle):
    status, said = bundle.run(NO_NANOBIND="1")
    assert status == 0 and "no native module" in said
    assert "is ready" in bundle.run(NO_NANOBIND="1")[1]


@pytest.mark.parametrize(
    ("name", "needed"), [("python", "3.99"), ("torch", "1.13"), ("no_such_package", "3.6")]
)
def test_another_python_or_torch_is_refused_at_once(bundle, name, needed):
    bundle.needs(**{"python": platform.python_version(), "torch": version("torch"), name: needed})
    status, said = bundle.run()
    assert (
        status == 2
        and f"{name} {needed} is needed, there is " in said
        and said.count("is needed") == 1
    )
    assert not bundle.work.exists() and bundle.asked.count("\n") == 1


def test_a_later_release_of_the_same_version_will_do(bundle):
    major, minor, *_ = version("torch").split(".")
    bundle.needs(python=platform.python_version().rpartition(".")[0], torch=f"{major}.{minor}")
    assert bundle.run()[0] == 0


def test_without_a_device_nothing_is_unpacked(bundle):
    status, said = bundle.run(NO_DEVICE="1")
    assert status == 2 and "sees no CUDA device" in said
    assert not bundle.work.exists()


# Pythons and a uv that have pip or do not. Each writes down its place and what it is asked for.
TOOL = """#!/bin/sh
[ {has_pip} = 1 ] || case "$*" in *pip*--version) exit 1 ;; esac
echo "$0 $*" >>"$CALLS"
"""
PYTHONS = {"bin/python3", ".venv/bin/python", ".cache/uv-bootstrap/bin/python"}


@pytest.fixture
def pack_with(tmp_path):
    """Runs gpu_bundle.sh in a small tree where only some tools have pip: status, words and calls."""

    def pack_with(*having, **variables):
        calls = tmp_path / "calls"
        for path in (*PYTHONS, "bin/uv", "scripts/gpu_bundle.sh"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        for path in (*PYTHONS, "bin/uv"):
            (tmp_path / path).write_text(TOOL.format(has_pip=int(path in having)))
            (tmp_path / path).chmod(0o755)
        for name in ("gpu_bundle.sh", "gpu_bundle_run.sh"):
            shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
        git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", tmp_path]
        for command in (["init"], ["commit", "--allow-empty", "--message", "x"]):
            subprocess.run([*git, *command], check=True, capture_output=True)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHON"} | variables
        environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(calls)}
        done = subprocess.run(
            ["bash", tmp_path / "scripts" / "gpu_bundle.sh", tmp_path / "out"],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        asked = calls.read_text().replace(f"{tmp_path}/", "") if calls.exists() else ""
        return done.returncode, done.stderr, asked

    return pack_with


@pytest.mark.parametrize(
    ("having", "pip"),
    [
        ("bin/python3", "python3 -m pip"),
        (".venv/bin/python", ".venv/bin/python -m pip"),
        (".cache/uv-bootstrap/bin/python", ".cache/uv-bootstrap/bin/python -m pip"),
        ("bin/uv", "uv tool run pip"),
    ],
)
def test_a_bundle_is_packed_with_the_pip_that_there_is(having, pip, pack_with):
    status, said, asked = pack_with(having)
    assert status == 0, said
    assert f".venv/bin/python scripts/gpu_site.py --target 3.12 out/site.tar.xz -- {pip}\n" in asked
    assert f"{pip} download" in asked


@pytest.mark.parametrize("variables", [{}, {"PYTHON": ".venv/bin/python"}])
def test_without_pip_the_message_says_what_helps(variables, pack_with):
    having = ["bin/python3"] if variables else []
    status, said, asked = pack_with(*having, **variables)
    assert status == 1 and "no pip in " in said and "set PYTHON" in said
    assert not asked, "before anything is packed"
