"""The command line itself: readable help, fast start, and imports only from its floor."""

import os
import subprocess
import sys

import pytest

from sglang_scout.cli import COMMANDS, doctor, main


@pytest.mark.parametrize(
    ("command", "slow"), [("--help", "numpy msgspec"), ("doctor", "numpy"), ("plan", "torch")]
)
def test_help_loads_nothing_slow(command, slow):
    code = "import atexit, sys; from sglang_scout.cli import main; " + (
        f"atexit.register(lambda: print(set({slow.split()}) & set(sys.modules), file=sys.stderr));"
        f"main(['{command}', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), *(([name, "--help"], 0) for name in COMMANDS), ([], 2), (["cure"], 2)],
)
def test_help_no_command_and_an_unknown_one(capsys, arguments, code):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert stop.value.code == code and (said.err or said.out).startswith("usage: sglang-scout")


def test_a_reader_that_stops_early(monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda args: {})
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["doctor", "--json"]) == 0
