"""``scripts/setup.sh`` in a folder where Python and uv only say what they are asked to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_scout.core.sglang_versions import ADAPTERS

ROOT = Path(__file__).resolve().parents[2]
NEW, OLD = ADAPTERS
GPU = os.path.exists("/dev/nvidiactl")
OURS, OTHER = ("mooncake-transfer-engine-" + x for x in ("non-cuda", "cuda13")[:: -1 if GPU else 1])
UV = '#!/bin/sh\necho "$@" >>asked\n'
PYTHON = '#!/bin/sh\ncase "$*" in *version_info*) echo 311 ;; esac\n'


@pytest.fixture
def set_up(tmp_path):
    """Runs it where these distributions are installed, and returns what uv was asked, and what was said."""
    for name in (
        "pyproject.toml",
        "scripts/setup.sh",
        "python/sglang_scout/core/sglang_versions.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "sgl-kernel").mkdir()
    for name, text in (
        ("bin/uv", UV),
        (".venv/bin/python", PYTHON),
        ("scripts/no_driver.sh", "#!/bin/sh\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*installed, wanted=""):
        for name in installed:
            path = f".venv/lib/python3.11/site-packages/{name.replace('-', '_', name.count('-') - 1)}.dist-info"
            (tmp_path / path).mkdir(parents=True)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        environment = {**os.environ, "SGLANG_VERSION": wanted, "PATH": path}
        done = subprocess.run(
            ["scripts/setup.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return (tmp_path / "asked").read_text().splitlines(), done.stderr

    return run


def test_the_other_mooncake_goes_before_ours_comes(set_up):
    asked, _ = set_up(f"{OURS}-0.3", f"{OTHER}-0.3", f"sglang-{NEW}")
    removed = next(i for i, x in enumerate(asked) if f"{OTHER} {OURS}" in x and "uninstall" in x)
    assert removed < next(i for i, x in enumerate(asked) if f"sglang=={NEW}" in x)


def test_ours_stays(set_up):
    asked, _ = set_up(f"{OURS}-0.3", f"sglang-{NEW}")
    assert "uninstall" not in " ".join(asked)


@pytest.mark.parametrize(
    ("installed", "wanted", "is_told"), [(OLD, "", True), (NEW, "", False), (OLD, OLD, False)]
)
def test_an_older_release_stays_and_one_is_told(set_up, installed, wanted, is_told):
    asked, said = set_up(f"sglang-{installed}", wanted=wanted)
    assert f"sglang=={installed}" in asked[-1]
    assert (f"SGLANG_VERSION={NEW} scripts/setup.sh" in said) == is_told
