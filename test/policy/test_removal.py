"""A policy is a file or a folder: without it the others are as before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_scout import _native

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, pytest
sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in type(x).__module__]
sys.path.insert(0, "python")
sys.exit(pytest.main(sys.argv[1:]))
"""
COLLECTED = [f"test/{name}" for name in ("benchmark", "cli", "core", "engine", "ops", "policy")]
RUN_TESTS = (
    "test/core/test_flags.py test/policy test/cli/test_plan.py test/engine/test_axes.py test/engine/test_memory.py "
    "test/engine/test_step.py test/engine/test_requests.py"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("folder", "policies"), [("hgca", "hgca"), ("learned", "rheo or sparda")])
def test_without_its_folder_everything_else_passes(tmp_path, folder, policies):
    """Most tests can be collected, and some are run, but for this one and those of the policy."""
    for name in ("python", "test", "scripts", "benchmark", "sgl-kernel"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(_native.__file__, tmp_path / "python" / "sglang_scout")
    for package in ("python/sglang_scout/policy", "test/policy"):
        shutil.rmtree(tmp_path / package / folder)

    def run(*args):
        command = [sys.executable, "-c", RUN, "-q", "-x", "-p", "no:cacheprovider", *args]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr

    run("--collect-only", *COLLECTED, "-k", f"not ({policies})")
    run(*RUN_TESTS.split(), "-m", "not slow", "-k", f"not ({policies}) and not removal")
