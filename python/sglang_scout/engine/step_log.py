"""One JSON line per decode step: what each request left to the CPU, and what the step cost.

The first line is an object with ``format``, ``version`` and what the server says of itself (facts).
Each further line is one step, of B requests and L layers:

    step, start_us, step_us   number; from its boundary (CLOCK_MONOTONIC) to the end of its last attention
    ages           [B]        steps that each request had done here before; -1 where that is not known
    full_pages     [B]        full pages of each request, among which it selects
    cpu_pages      [L, B]     selected pages that were computed on the CPU
    gpu_wait_us    [L]        time that the device waited for them
    recalled_pages, recall_bytes, recall_wait_us     of the recalls that ended at its boundary

Lines are written as the steps end: a server that is killed loses at most the step under way.
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
        self._line: dict[str, Any] = {}
        self._cpu_pages: list[list[int]] = []
        self._waited_us = counters.gpu_wait_us_by_layer.copy()
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._num_layers = num_layers
        self._write({"format": STEP_LOG.name, "version": STEP_LOG.version, **facts})

    def begin(
        self,
        step: int,
        start_ns: int,
        ages: npt.NDArray[np.int64],
        full_pages: npt.NDArray[np.integer],
    ) -> None:
        """A step's boundary has ended. ``ages``, ``full_pages`` are ``[B]``."""
        self._cpu_pages = [[] for _ in range(self._num_layers)]
        self._line = {
            "step": step,
            "start_us": start_ns // 1000,
            "ages": np.where(ages < _OLDEST, ages, -1).tolist(),
            "full_pages": full_pages.tolist(),
        }

    def layer(self, layer: int, cpu_pages: npt.NDArray[np.integer]) -> None:
        """``layer`` has selected and leaves ``[B]`` pages to the CPU."""
        self._cpu_pages[layer] = cpu_pages.tolist()

    def end(self, end_ns: int) -> None:
        """The step's last attention has ended: write its line."""
        if self._file is None:
            return
        line, counters = self._line, self._counters
        line["step_us"] = end_ns // 1000 - line["start_us"]
        line["cpu_pages"] = self._cpu_pages
        line["gpu_wait_us"] = (counters.gpu_wait_us_by_layer - self._waited_us).tolist()
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
