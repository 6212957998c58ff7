"""Writes the step log (format: core/step_log.py), one line when a step's results have arrived, two boundaries later: a
killed server loses two steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_scout.core.step_log import FORMAT, VERSION, Step
from sglang_scout.engine.counters import Counters
from sglang_scout.engine.step_results import LaunchedStep

logger = logging.getLogger(__name__)

_OLDEST = 2**30


class StepLog:
    """Writes the lines of one server.

    Args:
        path: output file; replaced.
        counters: totals; each line has the increments.
        facts: those of :class:`~sglang_scout.core.step_log.Facts` and more; JSON values.
    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, counters: Counters, facts: Mapping[str, Any]) -> None:
        self._counters = counters
        self._file: IO[bytes] | None = open(path, "wb", buffering=0)
        self._waited_us = counters.gpu_wait_us_by_layer.copy()
        self._totals = dict.fromkeys(("recalled_pages", "recall_bytes", "recall_wait_us"), 0)
        self._write({**facts, "format": FORMAT, "version": VERSION})

    def write(
        self,
        launched: LaunchedStep,
        cpu_pages: npt.NDArray[np.int64],
        cosine: npt.NDArray[np.float32],
    ) -> None:
        """Write the line of a step whose results have arrived; ``cpu_pages`` ``[L, B]``, ``cosine`` ``[L]``."""
        if self._file is None:
            return
        batch, waited_us = launched.batch, self._counters.gpu_wait_us_by_layer
        growth = {}
        for name, before in self._totals.items():
            now = int(getattr(self._counters, name))
            growth[name], self._totals[name] = now - before, now
        self._write(
            Step(
                step=launched.step,
                start_us=launched.start_ns // 1000,
                step_us=(launched.end_ns - launched.start_ns) // 1000,
                ages=np.where(batch.ages < _OLDEST, batch.ages, -1).tolist(),
                full_pages=batch.n_full.tolist(),
                cpu_pages=cpu_pages.tolist(),
                query_cosine=cosine.astype(float).round(4).tolist(),  # NaN becomes null
                gpu_wait_us=(waited_us - self._waited_us).tolist(),
                **growth,
            )
        )
        self._waited_us[:] = waited_us

    def _write(self, line: Mapping[str, Any] | Step) -> None:
        assert self._file is not None
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
