"""Short runs of the C++ ring tests under sanitizers; scripts/sanitize.sh has the long ones."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".cache" / "sanitize"
RING = "--ring"
FLAGS = {"address": "address,undefined", "thread": "thread"}


def sanitizer(name: str) -> str:
    """The name, if the machine can build and run with it; otherwise the test is skipped."""
    compiler, program = os.environ.get("CXX", "c++"), BUILD / f"probe-{name}"
    if not (shutil.which(compiler) and shutil.which("cmake")):
        pytest.skip("no C++ compiler or no cmake on PATH")
    BUILD.mkdir(parents=True, exist_ok=True)
    source, flag = "#include <thread>\nint main() { std::thread([] {}).join(); }", FLAGS[name]
    build = [compiler, f"-fsanitize={flag}", "-pthread", "-x", "c++", "-", "-o", program]
    for command in (build, [program]):
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot run {command[0]} for -fsanitize={flag}: {done.stderr[-200:]}")
    return name


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "sanitize.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.timeout(1200)  # the first build on a busy machine
@pytest.mark.parametrize("name", [pytest.param("address", marks=pytest.mark.slow), "thread"])
def test_ring_has_no_finding(name):
    done = run_script(sanitizer(name), RING, "--seconds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each once" in done.stdout
    assert ("all right" in done.stdout) == (name == "address")  # kill is skipped under tsan


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_kernel_has_a_finding():
    """All of scripts/sanitize.sh, with the instruction sets of this CPU."""
    for name in FLAGS:
        sanitizer(name)
    done = run_script("all")
    assert done.returncode == 0 and "no finding" in done.stdout, done.stdout + done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", ["early-done", "twice"])
def test_stress_finds_a_bug(bug):
    """Mutation check of the tests: answers published too early, items handed out twice."""
    name = sanitizer("thread")
    assert run_script(name, RING, "--seconds", "1").returncode == 0
    program = BUILD / name / "ring_test"
    command = [program, "stress", "--seconds", "60", "--break", bug]  # ends when found
    # With the sanitizer's reports off: the test itself has to detect it.
    environment = os.environ | {"TSAN_OPTIONS": "report_bugs=0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "FAILED: stress" in done.stderr, done.stdout + done.stderr
