"""One JSON line per decode step: what each request left to the CPU, and what the step cost.

The first line is an object with ``format``, ``version`` and what the server says of itself (facts).
Each further line is one step, of B requests and L layers:

    step, start_us, step_us   number; from its boundary (CLOCK_MONOTONIC) until its tokens are on the host
    ages           [B]        steps that each request had done here before; -1 where that is not known
    full_pages     [B]        full pages of each request, among which it selects
    cpu_pages      [L, B]     selected pages that were computed on the CPU
    gpu_wait_us    [L]        time that the device waited for them
    recalled_pages, recall_bytes, recall_wait_us     of the recalls that ended at its boundary

A line is written when the results of its step have come, two boundaries later: a server that is killed loses
two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_scout.core.formats import STEP_LOG
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.step_results import LaunchedStep

logger = logging.getLogger(__name__)

_OLDEST = 2**30

_TOTALS = ("recalled_pages", "recall_bytes", "recall_wait_us")


class StepLog:
    """Writes the lines of one server.

    Args:
        path: output file; replaced.
        num_layers: L.
        counters: totals, of which each line has the growth.
        facts: what a reader should know of the server; JSON values.
    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: str, num_layers: int, counters: Counters, facts: Mapping[str, Any]
    ) -> None:
        self._counters = counters
        self._file: IO[bytes] | None = open(path, "wb", buffering=0)
        self._waited_us = counters.gpu_wait_us_by_layer.copy()
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._write({"format": STEP_LOG.name, "version": STEP_LOG.version, **facts})

    def write(self, launched: LaunchedStep, cpu_pages: npt.NDArray[np.int64]) -> None:
        """Write the line of a step whose results have come; ``cpu_pages`` ``[L, B]``."""
        if self._file is None:
            return
        batch, counters = launched.batch, self._counters
        line = {
            "step": launched.step,
            "start_us": launched.start_ns // 1000,
            "step_us": (launched.end_ns - launched.start_ns) // 1000,
            "ages": np.where(batch.ages < _OLDEST, batch.ages, -1).tolist(),
            "full_pages": batch.n_full.tolist(),
            "cpu_pages": cpu_pages.tolist(),
            "gpu_wait_us": (counters.gpu_wait_us_by_layer - self._waited_us).tolist(),
        }
        self._waited_us[:] = counters.gpu_wait_us_by_layer
        for name, before in self._totals.items():
            now = getattr(counters, name)
            line[name], self._totals[name] = int(now - before), now
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            # A full disk is no reason to fail requests.
            logger.error("step log: %s; no more steps are written", error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
