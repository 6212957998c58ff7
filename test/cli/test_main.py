"""The command line itself: help that reads, starts quickly, and stays on its floor."""

import json
import subprocess
import sys
import time

import pytest

from sglang_scout.cli import COMMANDS, DESCRIPTION, main
from sglang_scout.cli.table import columns, gb, gib

HELP_LIMIT_S = 0.3


def run(*arguments, code="import sys; from sglang_scout.cli import main; sys.exit(main())"):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_is_quick():
    def once():
        begin = time.perf_counter()
        assert run("--help").returncode == 0
        return time.perf_counter() - begin

    assert min(once() for _ in range(5)) < HELP_LIMIT_S


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in COMMANDS)],
)
def test_help(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text.startswith("usage: sglang-scout")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_help_says_what_each_command_is_for():
    assert all(f"({name})" in DESCRIPTION for name in COMMANDS)


def test_no_command_and_an_unknown_one(capsys):
    for arguments in ([], ["cure"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_neither_sglang_nor_torch_is_imported():
    code = (
        "import json, sys; from sglang_scout.cli import main; main(['doctor', '--json']);"
        "print(json.dumps([m for m in ('sglang', 'torch') if m in sys.modules]))"
    )
    assert json.loads(run(code=code).stdout.splitlines()[-1]) == []


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "sglang_scout.cli", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("sglang-scout ")


def test_a_reader_that_stops_early_is_no_error():
    code = "import sys; from sglang_scout.cli import main; sys.exit(main(['doctor', '--json']))"
    quoted = f'{sys.executable} -c "{code}" | head -c 1'
    done = subprocess.run(["bash", "-c", quoted], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{" and "Error" not in done.stderr


def test_table():
    rows = [("a", "1"), ("long", "100", "note")]
    assert columns(rows, right=(1,)) == "a       1\nlong  100  note"
    assert columns(rows, indent=2).startswith("  a")
    assert columns([]) == ""


def test_sizes():
    assert gib(3 * 2**30) == "3.00 GiB" and gib(2**20) == "1.00 MiB" and gib(512) == "0.50 KiB"
    assert gb(1.5e9) == "1.50 GB" and gb(2e6) == "2.00 MB" and gb(0) == "0.00 KB"
