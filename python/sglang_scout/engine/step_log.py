"""Writes the step log (core/step_log.py says what is in it), a line as each step ends: a server that is
killed loses at most the step under way."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_scout.core.step_log import FORMAT, VERSION, Step
from sglang_scout.engine.counters import Counters

logger = logging.getLogger(__name__)

_OLDEST = 2**30


class StepLog:
    """Writes the lines of one server.

    Args:
        path: output file; replaced.
        num_layers: L.
        counters: totals, of which each line has the growth.
        facts: those of :class:`~sglang_scout.core.step_log.Facts` and more; JSON values.
    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: str, num_layers: int, counters: Counters, facts: Mapping[str, Any]
    ) -> None:
        self._counters = counters
        self._file: IO[bytes] | None = open(path, "wb", buffering=0)
        self._begun: dict[str, Any] = {}
        self._cpu_pages: list[list[int]] = []
        self._waited_us = counters.gpu_wait_us_by_layer.copy()
        self._totals = dict.fromkeys(("recalled_pages", "recall_bytes", "recall_wait_us"), 0)
        self._num_layers = num_layers
        self._write({**facts, "format": FORMAT, "version": VERSION})

    def begin(
        self,
        step: int,
        start_ns: int,
        ages: npt.NDArray[np.int64],
        full_pages: npt.NDArray[np.integer],
    ) -> None:
        """A step's boundary has ended. ``ages``, ``full_pages`` are ``[B]``."""
        self._cpu_pages = [[] for _ in range(self._num_layers)]
        self._begun = {
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
        waited_us = self._counters.gpu_wait_us_by_layer
        growth = {}
        for name, before in self._totals.items():
            now = int(getattr(self._counters, name))
            growth[name], self._totals[name] = now - before, now
        self._write(
            Step(
                **self._begun,
                **growth,
                step_us=end_ns // 1000 - self._begun["start_us"],
                cpu_pages=self._cpu_pages,
                gpu_wait_us=(waited_us - self._waited_us).tolist(),
            )
        )
        self._waited_us[:] = waited_us

    def _write(self, line: Mapping[str, Any] | Step) -> None:
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
