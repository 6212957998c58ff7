"""``scripts/setup.sh`` in a folder where Python and uv only say what they are asked to do."""

import os
import subprocess
from pathlib import Path

import pytest

from sglang_scout.core.flags import ADAPTERS

ROOT = Path(__file__).resolve().parents[2]
NEW, OLD = ADAPTERS
GPU = os.path.exists("/dev/nvidiactl")
OURS, OTHER = ("mooncake-transfer-engine-" + x for x in ("non-cuda", "cuda13")[:: -1 if GPU else 1])
PROGRAMS = {
    "bin/uv": 'echo "$@" >>asked',
    "bin/old_python": "exit 1",
    ".venv/bin/python": 'case "$*" in *get_path*) echo include ;; esac',
}


@pytest.fixture
def set_up(tmp_path):
    """Runs it where these distributions are installed, and returns what uv was asked, and what was said."""
    for name, text in {
        **{name: f"#!/bin/sh\n{text}\n" for name, text in PROGRAMS.items()},
        **{x: (ROOT / x).read_text() for x in ("pyproject.toml", "scripts/setup.sh")},
        "python/sglang_scout/core/flags.py": f'ADAPTERS = {{"{NEW}": "", "{OLD}": ""}}\n',
        "include/Python.h": "",
        "sgl-kernel/x": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*installed, status=0, **variables):
        for name in installed:
            path = f".venv/lib/python3.11/site-packages/{name.replace('-', '_', name.count('-') - 1)}.dist-info"
            (tmp_path / path).mkdir(parents=True)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        env = {**os.environ, "SGLANG_VERSION": "", "PATH": path, **variables}
        command = ["scripts/setup.sh"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert done.returncode == status, done.stderr
        asked = tmp_path / "asked"
        return asked.read_text().splitlines() if asked.exists() else [], done.stderr

    return run


def test_the_other_mooncake_goes_before_ours_comes(set_up):
    asked, _ = set_up(f"{OURS}-0.3", f"{OTHER}-0.3", f"sglang-{NEW}")
    removed = next(i for i, x in enumerate(asked) if f"{OTHER} {OURS}" in x and "uninstall" in x)
    assert removed < next(i for i, x in enumerate(asked) if f"sglang=={NEW}" in x)


@pytest.mark.parametrize(
    ("installed", "wanted", "is_told"), [(OLD, "", True), (NEW, "", False), (OLD, OLD, False)]
)
def test_an_older_release_stays_and_one_is_told(set_up, installed, wanted, is_told):
    asked, said = set_up(f"{OURS}-0.3", f"sglang-{installed}", SGLANG_VERSION=wanted)
    assert f"sglang=={installed}" in asked[-1] and "uninstall" not in " ".join(asked)
    assert (f"SGLANG_VERSION={NEW} scripts/setup.sh" in said) == is_told


def test_other_releases_and_an_old_python_are_refused(set_up, tmp_path):
    _, said = set_up(SGLANG_VERSION="0.5.16", status=1)
    assert "SGLANG_VERSION=0.5.16 is not supported" in said
    (tmp_path / ".venv/bin/python").unlink()
    asked, said = set_up(PYTHON="old_python", status=1)
    assert "PYTHON=old_python cannot be run, or is older than 3.11" in said and len(asked) == 1
