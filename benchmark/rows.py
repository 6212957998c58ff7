"""The row format of the benchmarks: one JSON object per line.

Every row has
    benchmark, impl, status       "ok", "absent", "skipped" or "failed"; reason says why, "" if ok
    commit, dirty                 of this repository; dirty: with uncommitted changes
    cpu, cores, versions          model name, CPUs of this process, versions of the packages used
    command, time_utc, load_average
    nvidia_smi                    if a CUDA device is measured: its name, memory, driver, clocks, power limit and link,
                                  or {"absent": why not known}
and, if something was measured,
    samples_us                    raw, in the order in which they were taken
    median_us, spread, unstable   spread = (p90 - p10) / median; unstable if above 10 %
If the measured quantity is not a time, untimed is true instead.

A failure, an absent baseline and a size that does not fit are rows too. Each benchmark adds sizes and results.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
UNSTABLE_SPREAD = 0.10
STATUSES = ("ok", "absent", "skipped", "failed")

_OF_ALL = (
    "benchmark",
    "impl",
    "status",
    "reason",
    "commit",
    "cpu",
    "cores",
    "versions",
    "time_utc",
)
_MEASURED = ("samples_us", "median_us", "spread", "unstable")
_SMI = ("name", "memory.total", "driver_version", "clocks.sm", "clocks.mem", "power.limit")
_SMI += ("pcie.link.gen.current",)


def percentile(samples: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest samples."""
    return float(np.percentile(samples, percent))


def summary(samples_us: Sequence[float]) -> Row:
    """samples_us, median_us, spread and unstable of a row.

    Raises:
        ValueError: no samples, or one that is not a positive number.
    """
    if not samples_us:
        raise ValueError("samples_us is empty; a row without samples has a status other than ok")
    wrong = [x for x in samples_us if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise ValueError(f"samples_us has {wrong[0]}, expected positive numbers")
    median_us = percentile(samples_us, 50)
    spread = (percentile(samples_us, 90) - percentile(samples_us, 10)) / median_us
    return {
        "samples_us": [round(x, 3) for x in samples_us],
        "median_us": round(median_us, 3),
        "spread": round(spread, 4),
        "unstable": spread > UNSTABLE_SPREAD,
    }


def problem(row: Any) -> str:
    """Of a row, "" if there is none."""
    if not isinstance(row, dict):
        return "not an object"
    is_timed = row.get("status") == "ok" and not row.get("untimed")
    required = (*_OF_ALL, *(_MEASURED if is_timed else ()))
    if missing := [name for name in required if name not in row]:
        return f"no {', '.join(missing)}"
    if row["status"] not in STATUSES:
        return f"status is {row['status']!r}, expected one of {', '.join(STATUSES)}"
    return "" if row["status"] == "ok" or row["reason"] else f"{row['status']} without a reason"


def environment(benchmark: str, packages: Iterable[str] = (), *, cuda: bool = False) -> Row:
    """The fields shared by all rows of a run.

    Args:
        cuda: a CUDA device is measured.
    """
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    device = {"nvidia_smi": nvidia_smi()} if cuda else {}
    return {
        "benchmark": benchmark,
        **device,
        **_source(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def nvidia_smi() -> dict[str, str]:
    """What nvidia-smi says about the first device, as printed; ``{"absent": REASON}`` if there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = done.stdout.splitlines()[0].split(",")
        return dict(zip(_SMI, map(str.strip, values), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return {"absent": f"nvidia-smi: {error}"}


def cpu_model() -> str:
    """Model name with family and model, e.g. "AMD EPYC (family 26 model 2)"."""
    text = Path("/proc/cpuinfo").read_text()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.machine()
    name, family = found["model name"].strip(), found.get("cpu family")
    return f"{name} (family {family} model {found.get('model')})"


def _source() -> Row:
    """commit and dirty: from BENCHMARK_COMMIT if set by a bundle (scripts/gpu_bundle.sh), else from git."""
    if packed := os.environ.get("BENCHMARK_COMMIT"):
        commit = packed.removesuffix("-dirty")
        return {"commit": commit, "dirty": commit != packed}
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def weights_digest(model_path: str) -> str:
    """16 hex digits over the weights, in the order of the files' names."""
    digest = hashlib.sha256()
    for path in sorted(Path(model_path).glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


class Writer:
    """Validates rows and writes each immediately as a line.

    Args:
        path: None: rows are only kept in memory.
        shared: fields of all rows.
        append: to the rows in the file; a truncated last line is dropped. Without it the file is overwritten.
    """

    def __init__(self, path: Path | None, shared: Row, *, append: bool = False) -> None:
        self._shared = shared
        self._file: TextIO | None = None
        self.rows: list[Row] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if append and path.exists():
                kept = path.read_bytes()
                begun = kept.rpartition(b"\n")[2]
                if begun.startswith(b'{"'):  # a row whose writer was killed
                    os.truncate(path, len(kept) - len(begun))
            self._file = path.open("a" if append else "w", encoding="utf-8")

    def add(self, impl: str, status: str = "ok", reason: str = "", **fields: Any) -> Row:
        """Adds a row. Raises ValueError if it is malformed."""
        row = {**self._shared, "impl": impl, "status": status, "reason": reason, **fields}
        if wrong := problem(row):
            raise ValueError(f"row of {impl}: {wrong}")
        self.rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        return row

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rows(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: a line is not a row; names the line.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path.name}:{number}: not JSON ({e.msg})") from e
        if wrong := problem(row):
            raise ValueError(f"{path.name}:{number}: {wrong}")
        rows.append(row)
    return rows


class RowFile(Writer):
    """A file of rows that a later run resumes.

    Args:
        path: None keeps the rows in memory only.
        environment: fields of all new rows that do not identify the measurement.
        fields: fields of all new rows that do: a row of the file counts as done only if it has the
            same values.
    Raises:
        ValueError: a line of the file is not a row.
    """

    def __init__(self, path: Path | None, environment: Row, fields: Row) -> None:
        super().__init__(path, {**environment, **fields}, append=True)
        same = json.loads(json.dumps(fields))
        same |= {"benchmark": environment["benchmark"], "status": "ok"}
        if path is not None:
            self.rows = [row for row in read_rows(path) if row | same == row]

    def renew(self, environment: Row) -> None:
        """Replaces the environment of rows added from now on: servers that start late run later code."""
        self._shared |= environment

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these fields."""
        return any(row | key == row for row in self.rows)


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """A program's, described by its docstring as it is written; help shows defaults."""

    class Form(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action: argparse.Action) -> str | None:
            return super()._get_help_string(action) if action.default else action.help

    return argparse.ArgumentParser(description=doc, formatter_class=Form)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """First column left-aligned, the others right-aligned."""
    rule = "| --- |" + " ---: |" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(x)} |" for x in lines)])
