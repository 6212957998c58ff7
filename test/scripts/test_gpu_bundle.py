"""A bundle's ``run.sh`` (scripts/gpu_bundle_run.sh) with a torch that claims a device."""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHECK = """#!/usr/bin/env bash
echo "$2 $BENCHMARK_COMMIT $SECONDS_LIMIT $PYTHONPATH" >>"$1/rows.jsonl"
ls "$TRITON_CACHE_DIR/" >"$1/triton"
"""
TORCH = """__version__ = "2.11.0+cu130"
class cuda:
    is_available = staticmethod(lambda: {device})
"""
# Has no packages, and writes down what it is asked for.
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
exec "$REAL" -S "$@"
"""


def pack(path, files):
    with tarfile.open(path, "w:xz") as archive:
        for name, text in files.items():
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(text), 0o755
            archive.addfile(about, io.BytesIO(text.encode()))


class Bundle:
    """A bundle, and what its run.sh finds around it."""

    def __init__(self, folder):
        self.folder, self.here, self.asked = folder, folder / "bundle", ""
        self.here.mkdir()
        (self.here / "commit").write_text("0123abc-dirty\n")
        self.needs(python=platform.python_version(), torch="2.11")
        pack(self.here / "site-0.tar.xz", {"carried.py": "x = 1\n"})
        pack(self.here / "site-1.tar.xz", {"other.py": "x = 1\n"})
        self.pack_native("")
        files = {"scripts/gpu_check.sh": CHECK, "python/sglang_scout/__init__.py": ""}
        pack(self.here / "tree.tar.xz", files)
        shutil.copy(ROOT / "scripts" / "gpu_bundle_run.sh", self.here / "run.sh")
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
        (folder / "fake").mkdir()

    def needs(self, **versions):
        lines = [f"{name} {needed}\n" for name, needed in versions.items()]
        (self.here / "needs").write_text("".join(lines))

    def pack_native(self, source):
        pack(self.here / "tree-native.tar.xz", {"python/sglang_scout/_native.py": source})

    def run(self, mode="first", device=True):
        calls = self.folder / "calls"
        calls.write_text("")
        (self.folder / "fake" / "torch.py").write_text(TORCH.format(device=device))
        places = {"CALLS": "calls", "PYTHON": "python", "PYTHONPATH": "fake", "TMPDIR": ""}
        places["SHMEM_HUGE"] = "shmem_enabled"
        env = {**os.environ, "REAL": sys.executable}
        env |= {name: str(self.folder / place) for name, place in places.items()}
        env.pop("SECONDS_LIMIT", None)
        command = ["bash", self.here / "run.sh", self.folder / "results", mode]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        self.asked = calls.read_text()
        return done.returncode, done.stdout + done.stderr

    def works(self):
        return sorted(self.folder.glob("scout-0123abc-*"))


@pytest.fixture
def bundle(tmp_path):
    return Bundle(tmp_path)


@pytest.mark.parametrize(("mode", "limit_s"), [("first", 230), ("figures", 440)])
def test_the_first_call_unpacks_what_later_ones_find(mode, limit_s, bundle):
    status, said = bundle.run(mode)
    assert status == 0 and "no native module" not in said and "MemTotal" in said, said
    assert (bundle.folder / "shmem_enabled").read_text() == "advise\n"
    (work,) = bundle.works()
    compiled = {path.name.partition(".")[0] for path in (work / "site").rglob("*.pyc")}
    assert compiled == {"carried", "other"}
    row = (bundle.folder / "results" / "rows.jsonl").read_text().split()
    assert row[:2] == [mode, "0123abc-dirty"] and row[3].startswith(f"{work}/site:")
    assert limit_s - 60 < int(row[2]) <= limit_s, "less the preparation"
    assert bundle.run(mode)[0] == 0 and "compileall" not in bundle.asked


def test_kernels_that_a_call_brought_back_are_at_the_path_that_they_were_compiled_at(bundle):
    pack(bundle.here / "triton-cache.tar.xz", {"kernel.cubin": "x"})
    assert bundle.run()[0] == 0
    assert (bundle.folder / "results" / "triton").read_text() == "kernel.cubin\n"
    assert (bundle.folder / "scout-triton" / "kernel.cubin").exists(), "whatever the commit"


def test_a_native_module_that_does_not_load_is_said(bundle):
    bundle.pack_native("raise ImportError('of another Python')")
    status, said = bundle.run()
    assert status == 0 and "no native module" in said and "of another Python" in said


def test_another_python_or_torch_and_no_device_are_refused(bundle):
    status, said = bundle.run(device=False)
    assert status == 2 and "sees no CUDA device" in said and not bundle.works()
    for name, needed in {"python": "3.99", "torch": "1.13", "no_such_package": "3.6"}.items():
        bundle.needs(**{"python": platform.python_version(), "torch": "2.11", name: needed})
        status, said = bundle.run()
        assert status == 2 and f"needs {name} {needed}, found " in said
        assert said.count("needs ") == 1 and not bundle.works()
