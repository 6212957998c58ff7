"""Reads a step log that ``{"step_log": FILE}`` wrote (engine/step_log.py says what is in it)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.formats import STEP_LOG

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Step(msgspec.Struct, frozen=True):
    """One decode step of B requests and L layers; see the writer for the fields."""

    step: int
    start_us: int
    step_us: int
    ages: list[int]
    full_pages: list[int]
    cpu_pages: list[list[int]]
    gpu_wait_us: list[int]
    recalled_pages: int
    recall_bytes: int
    recall_wait_us: int


@dataclass(frozen=True)
class StepLogFile:
    """``facts`` is what the server says of itself: policy, layers, budget_tokens and others."""

    facts: dict[str, Any]
    steps: list[Step]

    @property
    def num_layers(self) -> int:
        return int(self.facts["layers"])

    @property
    def budget_pages(self) -> int:
        return int(self.facts["budget_tokens"]) // int(self.facts["page_size_tokens"])


def read_step_log(path: str | Path) -> StepLogFile:
    """All complete lines of a log; the server may still be writing.

    Raises:
        ConfigError: not a step log, or of another version.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"step log {str(path)!r}: cannot read it: {error.strerror}") from None
    try:
        facts = msgspec.json.decode(lines[0], type=dict[str, Any])
        if (facts.get("format"), facts.get("version")) != STEP_LOG:
            raise ValueError(
                f"its first line is not that of a {STEP_LOG.name} file of version {STEP_LOG.version}"
            )
        decoder = msgspec.json.Decoder(Step)
        steps = [decoder.decode(line) for line in lines[1:]]
    except (IndexError, ValueError) as error:
        raise ConfigError(
            f"step log {str(path)!r}: {error or 'it is empty'}; give a file that "
            """--kv-offload-config '{"step_log": "FILE"}' made on a decode server"""
        ) from None
    return StepLogFile(facts, steps)


def ratios_by_age(log: StepLogFile, num_ages: int) -> tuple[Floats, Counts]:
    """Mean CPU compute ratio per layer and age, over requests that are larger than the budget.

    Returns:
        ``[L, num_ages]`` ratio of requests that had done 0, 1, .. steps before; 0 where there was
        none, and ``[num_ages]`` their number.
    """
    pages = np.zeros((log.num_layers, num_ages))
    rows = np.zeros(num_ages, np.int64)
    for step in log.steps:
        ages = np.array(step.ages, np.int64)
        counts = (ages >= 0) & (ages < num_ages)
        counts &= np.array(step.full_pages) > log.budget_pages
        if not counts.any():
            continue
        np.add.at(rows, ages[counts], 1)
        missed = np.array(step.cpu_pages, np.int64)[:, counts]
        for layer in range(log.num_layers):
            np.add.at(pages[layer], ages[counts], missed[layer])
    return pages / np.maximum(rows, 1) / log.budget_pages, rows
