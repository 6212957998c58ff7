"""The single command for the comparison: each part accepts its arguments."""

import subprocess
import sys

import pytest

from benchmark.systems.__main__ import ROOT, parts


@pytest.mark.parametrize("command", parts(1), ids=lambda c: "-".join(c[:2]))
def test_every_part_accepts_its_arguments(command):
    """With --help appended, which argparse reaches only if all arguments before it are well-formed."""
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_weights_that_are_there_are_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmark.systems.__main__.ROOT", tmp_path)
    assert [command[0] for command in parts(1)[:2]] == ["scripts/train_forecast.py"] * 2
    (tmp_path / ".cache" / "weights").mkdir(parents=True)
    for kind in ("forecast", "pilot"):
        (tmp_path / ".cache" / "weights" / f"smollm2-135m-{kind}.npz").touch()
    assert all(command[0] == "-m" for command in parts(1))
