"""The command line itself: readable help, fast start, and imports only from its floor."""

import subprocess
import sys
import time

import pytest

from sglang_scout.cli import COMMANDS, main

HELP_LIMIT_S = 0.3


MAIN = "import sys; from sglang_scout.cli import main; sys.exit(main())"


def test_help_is_quick():
    def once():
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", MAIN, "--help"], capture_output=True, check=True)
        return time.perf_counter() - begin

    assert min(once() for _ in range(3)) < HELP_LIMIT_S


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in COMMANDS)],
)
def test_help(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text.startswith("usage: sglang-scout")


def test_no_command_and_an_unknown_one(capsys):
    for arguments in ([], ["cure"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "sglang_scout.cli", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("sglang-scout ")


def test_a_reader_that_stops_early_is_no_error(tiny_model):
    plan = f"plan --model-path {tiny_model()} --host-gb 1 --json"
    quoted = f'{sys.executable} -c "{MAIN}" {plan} | head -c 1'
    done = subprocess.run(["bash", "-c", quoted], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{" and "Error" not in done.stderr
