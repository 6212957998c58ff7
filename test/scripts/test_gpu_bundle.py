"""Packing a bundle (scripts/gpu_bundle.sh), and the ``run.sh`` of a small one, with a Python that claims a device."""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHECK = """#!/usr/bin/env bash
echo "$BENCHMARK_COMMIT $((SECONDS_LIMIT > 40 && SECONDS_LIMIT <= 99)) $PYTHONPATH" >>"$1/rows.jsonl"
exit {status}
"""
# Has torch, a device and pip, whatever the real one has. Writes down what it is asked for.
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
*"import torch"*) exit "$NO_DEVICE" ;;
*--target*/built*)
    [ "$NO_COMPILER" = 0 ] || { echo "no compiler"; exit 1; }
    for tree; do :; done
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
        self.folder, self.here, self.asked = folder, folder / "bundle", ""
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
        calls = self.folder / "calls"
        calls.write_text("")
        variables = {
            "NO_DEVICE": "0", "NO_COMPILER": "0", **variables, "REAL": sys.executable,
            "PYTHON": str(self.folder / "python"), "CALLS": str(calls),
            "TMPDIR": str(self.folder), "SECONDS_LIMIT": "99",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", self.here / "run.sh", self.folder / "results"],
            env={**os.environ, **variables}, capture_output=True, text=True,
        )  # fmt: skip
        self.asked = calls.read_text()
        return done.returncode, done.stdout + done.stderr

    def works(self):
        return sorted(self.folder.glob("scout-*"))


@pytest.fixture
def bundle(tmp_path):
    return Bundle(tmp_path)


def test_the_first_call_makes_what_the_steps_need_and_later_ones_find_it(bundle):
    status, said = bundle.run()
    assert status == 0 and "no native module" not in said, said
    (work,) = bundle.works()
    assert (work / "tree" / "python" / "sglang_scout" / "_native.so").exists()
    assert (work / "site" / "sglang_scout-0.dist-info").is_dir()
    installed = next(x for x in bundle.asked.splitlines() if "--no-compile" in x)
    assert "no_such_package" in installed and "/pytest-1-py3" not in installed
    rows = (bundle.folder / "results" / "rows.jsonl").read_text()
    assert rows.startswith(f"0123abc-dirty 1 {work}/site")
    assert bundle.run()[0] == 0 and "pip" not in bundle.asked and "compileall" not in bundle.asked


@pytest.mark.slow
def test_another_tree_or_what_was_cut_short_is_made_anew(bundle):
    bundle.run()
    (work,) = bundle.works()
    (work / "ready").unlink()
    (work / "stale").touch()
    assert bundle.run()[0] == 0 and not (work / "stale").exists()
    bundle.pack_tree(status=3)
    assert bundle.run()[0] == 3 and len(bundle.works()) == 2
    assert len((bundle.folder / "results" / "rows.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_build_that_fails_is_said_and_tried_again(bundle):
    status, said = bundle.run(NO_COMPILER="1")
    assert status == 0 and "no native module" in said and "no compiler" in said
    said = bundle.run()[1]
    assert "no native module" not in said and "--no-compile" not in bundle.asked


@pytest.mark.parametrize(
    ("name", "needed"), [("python", "3.99"), ("torch", "1.13"), ("no_such_package", "3.6")]
)
def test_another_python_or_torch_is_refused_at_once(bundle, name, needed):
    bundle.needs(**{"python": platform.python_version(), "torch": version("torch"), name: needed})
    status, said = bundle.run()
    assert status == 2 and f"{name} {needed} is needed, there is " in said
    assert said.count("is needed") == 1 and not bundle.works()


def test_without_a_device_nothing_is_unpacked(bundle):
    status, said = bundle.run(NO_DEVICE="1")
    assert status == 2 and "sees no CUDA device" in said and not bundle.works()


# Pythons and a uv that have pip or do not. Each writes down its place and what it is asked for.
TOOL = """#!/bin/sh
[ {has_pip} = 1 ] || case "$*" in *pip*--version) exit 1 ;; esac
echo "$0 $*" >>"$CALLS"
case "$*" in *--target*) mkdir -p "{out}/site" ;; esac
"""
PYTHONS = {"bin/python3", ".venv/bin/python", ".cache/uv-bootstrap/bin/python"}


@pytest.fixture
def pack_with(tmp_path):
    """Runs gpu_bundle.sh in a small tree where only some tools have pip: status, words and calls."""

    def pack_with(*having, torch="2.11.0", **variables):
        calls = tmp_path / "calls"
        packages = tmp_path / ".venv/lib/python3.12/site-packages"
        (packages / f"torch-{torch}.dist-info").mkdir(parents=True)
        for path in (*PYTHONS, "bin/uv", "scripts/gpu_bundle.sh"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        for path in (*PYTHONS, "bin/uv"):
            (tmp_path / path).write_text(
                TOOL.format(has_pip=int(path in having), out=tmp_path / "out")
            )
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
    assert f"{pip} install" in asked and "--target out/site" in asked
    assert f"{pip} download" in asked


def test_an_sglang_for_another_torch_is_not_packed(pack_with):
    status, said, asked = pack_with("bin/python3", torch="2.14.1")
    assert status == 1 and "SGLANG_VERSION=0.5.15.post1 scripts/setup.sh" in said
    assert "install" not in asked


@pytest.mark.parametrize("variables", [{}, {"PYTHON": ".venv/bin/python"}])
def test_without_pip_the_message_says_what_helps(variables, pack_with):
    having = ["bin/python3"] if variables else []
    status, said, asked = pack_with(*having, **variables)
    assert status == 1 and "no pip in " in said and "set PYTHON" in said
    assert not asked, "before anything is packed"
