"""``sglang-scout``: checks, sizes, intervals and timings for operators, without sglang; torch only in ``plan``, which
loads the policies.

Each command is a module here with ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(args) -> exit code``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from sglang_scout import __version__
from sglang_scout.core.errors import ScoutError

GIB = 2**30
DESCRIPTION = (
    "Tools for SGLang servers that run with --kv-offload. Start the servers themselves with SGLang's "
    "own commands. The tools here check a machine (doctor), say how many requests fit (plan), show a "
    "running decode server (dashboard), explain where the time of a decode step goes (report), and "
    "choose how often each layer recalls pages (profile)."
)
COMMANDS = {
    "doctor": "check whether this machine can serve",
    "plan": "how much memory a request takes and how many requests fit",
    "report": "where the time of a decode step goes, from a step log",
    "profile": "recall intervals for each layer, from a step log",
    "dashboard": "a live page of a decode server",
}


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-scout", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"sglang-scout {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in words[:1]:
            # The others are not imported: the help must not load numpy and the native module.
            module = importlib.import_module(f"sglang_scout.cli.{name}")
            command.description = module.DESCRIPTION
            module.add_arguments(command)
            as_json = "print one JSON object instead of text"
            command.add_argument("--json", action="store_true", help=as_json)
            command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 0 fine, 1 a check failed or something does not fit, 2 a wrong argument."""
    words = sys.argv[1:] if argv is None else argv
    args = _parser(words).parse_args(words)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ScoutError as error:
        print(f"sglang-scout: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, e.g. head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0) -> str:
    """Rows of equal length as lines with aligned columns, two spaces apart; ``right``: the right-aligned ones."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [">" if i in right else "<" for i in range(len(sizes))]
    line = " " * indent + "  ".join(f"{{:{a}{n}}}" for a, n in zip(aligned, sizes, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


def gib(nbytes: float, base: int = 1024, units: Sequence[str] = ("GiB", "MiB", "KiB")) -> str:
    """Bytes in powers of ``base``: "10.00 GiB"."""
    value = nbytes / base**3
    # A tenth of a unit is more readable than a hundred of the next smaller one.
    while value < 0.1 and len(units) > 1:
        value, units = value * base, units[1:]
    return f"{value:.2f} {units[0]}"


def gb(nbytes: float) -> str:
    """Bytes in powers of 1000: "10.74 GB"."""
    return gib(nbytes, 1000, ("GB", "MB", "KB"))
