"""The step log: one JSON line per decode step, written by a server and read by `report` and `profile`.

The first line is :class:`Facts`; each further one a :class:`Step`, written when its results have arrived, two
boundaries later: a killed server loses two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import ModelIdentity

logger = logging.getLogger(__name__)

FORMAT, VERSION = "sglang-scout-steps", 2
COLD_STEPS = 3
"""First steps of a request, in which without a hint none of its pages are resident: the first selection is known two
boundaries later, and resident one boundary after that."""
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Facts(msgspec.Struct, frozen=True):
    """Required fields of the first line; the server adds more. ``selection`` has ``SELECTION_KEYS``."""

    format: str
    version: int
    policy: str
    recall: str
    model: str
    layers: int
    budget_tokens: int
    page_size_tokens: int
    identity: ModelIdentity
    selection: dict[str, str | int | float]


class Step(msgspec.Struct, frozen=True):
    """One decode step of B requests and L layers."""

    step: int
    start_us: int  # of its boundary, CLOCK_MONOTONIC
    step_us: int  # from there until its tokens are on the host
    ages: list[int]  # [B], previous steps of each request here
    full_pages: list[int]  # [B], of each request: the candidates
    cpu_pages: list[list[int]]  # [L, B], selected pages computed on the CPU
    gpu_wait_us: list[int]  # [L], that the device waited for them
    recalled_pages: int  # as the next two, of the recalls that ended at the next boundary
    recall_bytes: int
    recall_wait_us: int
    # [L], of predicted and real queries, mean over heads and requests; None: not predicted.
    query_cosine: list[float | None] = []


class StepLog:
    """Writes the lines of one server to ``path``, which is replaced; ``facts`` are those of :class:`Facts` and more."""

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self._file: IO[bytes] | None = open(path, "wb", buffering=0)
        self.write({**facts, "format": FORMAT, "version": VERSION})

    def write(self, line: Mapping[str, Any] | Step) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            # A full disk must not fail requests.
            logger.error("cannot write the step log: %s; no more steps are written", error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class StepLogFile(NamedTuple):
    """The contents of a step log."""

    facts: Facts
    steps: list[Step]

    @property
    def budget_pages(self) -> int:
        return self.facts.budget_tokens // self.facts.page_size_tokens


def read_step_log(path: str | Path) -> StepLogFile:
    """All complete lines of a log; the server may still be writing."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(
            f"step log {str(path)!r}: cannot read it: {error.strerror}; name the step_log that a server wrote"
        ) from None
    try:
        about = msgspec.json.decode(lines[0], type=dict) if lines else {}
        if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} file of version {VERSION}")
        facts = msgspec.convert(about, Facts)
        decoder = msgspec.json.Decoder(Step)
        steps = [decoder.decode(line) for line in lines[1:]]
    except ValueError as error:
        raise ConfigError(
            f"step log {str(path)!r}: {error}; give a file that "
            """--kv-offload-config '{"step_log": "FILE"}' made on a decode server"""
        ) from None
    return StepLogFile(facts, steps)


def ratios_by_age(log: StepLogFile) -> tuple[Floats, Counts]:
    """Mean CPU compute ratio ``[L, T]`` of requests longer than the budget at the age of 0 to T - 1 steps, 0 without
    any, and ``[T]`` their number."""
    oldest = max((age for step in log.steps for age in step.ages), default=0)
    pages, rows = np.zeros((log.facts.layers, oldest + 1)), np.zeros(oldest + 1, np.int64)
    for step in log.steps:
        counts = np.array(step.full_pages) > log.budget_pages
        ages = np.array(step.ages, np.int64)[counts]
        np.add.at(rows, ages, 1)
        missed = np.array(step.cpu_pages, np.int64).reshape(len(pages), -1)[:, counts]
        np.add.at(pages, (slice(None), ages), missed)
    return pages / np.maximum(rows, 1) / log.budget_pages, rows
