"""The command line itself: readable help, fast start, and imports only from its floor."""

import os
import subprocess
import sys
import time

import pytest

from sglang_scout.cli import COMMANDS, doctor, main

HELP_LIMIT_S = 0.3
PROGRAM = [sys.executable, "-m", "sglang_scout.cli"]


def test_help_is_quick():
    def once():
        begin = time.perf_counter()
        subprocess.run([*PROGRAM, "--help"], capture_output=True, check=True)
        return time.perf_counter() - begin

    assert min(once() for _ in range(3)) < HELP_LIMIT_S


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text.startswith("usage: sglang-scout")


@pytest.mark.parametrize("arguments", [[], ["cure"]])
def test_no_command_and_an_unknown_one(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and "usage" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error(monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda args: {})
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["doctor", "--json"]) == 0
