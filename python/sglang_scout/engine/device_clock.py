"""Device timestamps of the parts of a step: the timeline of a step that the host only launches.

A slice's ends are kernels that write the device's clock to the next words of a buffer, in a captured graph at every
replay. The words are read back with the step's results, two boundaries later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.doorbell import write_stamp

Times = npt.NDArray[np.int64]

STAMPS_PER_LAYER = 24
_CALIBRATIONS = 8


class Cut(NamedTuple):
    """A slice between two stamps."""

    row: str
    name: str
    start: int
    end: int
    args: dict[str, Any]


class DeviceClock:
    """``stamps`` ``[words]`` int64 on the device, ns of its clock; ``tracer`` gets their slices."""

    def __init__(self, tracer: Tracer, layers: int, device: torch.device) -> None:
        self._tracer = tracer
        self.stamps = torch.zeros(layers * STAMPS_PER_LAYER, dtype=torch.int64, device=device)
        self._used = 0
        self._cuts: list[Cut] = []
        self._captured: list[Cut] = []
        self._is_empty_step = self._has_begun = False
        self._ahead_ns = self._offset()

    def _offset(self) -> int:
        """By how much the device's clock is ahead of the host's, from the fastest of several tries."""
        tries = []
        for _ in range(_CALIBRATIONS):
            before = time.monotonic_ns()
            write_stamp(self.stamps, 0)
            there = int(self.stamps[0])  # waits for it
            after = time.monotonic_ns()
            tries.append((after - before, there - (before + after) // 2))
        return min(tries)[1]

    def pause(self) -> None:
        """Until the next step begins, everything is warm-up or capture."""
        self._is_empty_step, self._has_begun, self._cuts = True, False, []

    def begin_step(self) -> None:
        """The step is a replay, unless layers begin."""
        self._is_empty_step, self._has_begun, self._cuts = False, False, []

    def begin_layers(self) -> None:
        """The first layer of a step, or of a capture, follows."""
        self._used, self._has_begun, self._cuts = 0, True, []
        if self._is_empty_step:
            self._captured = self._cuts

    @contextlib.contextmanager
    def slice(self, row: str, name: str, **args: Any) -> Iterator[None]:
        """As :meth:`Tracer.slice`, of what is launched inside the ``with`` block."""
        start = self._stamp()
        yield
        if start is not None and (end := self._stamp()) is not None:
            self._cuts.append(Cut(row, name, start, end, args))

    def _stamp(self) -> int | None:
        """The index of a new stamp; None where nothing is recorded."""
        if not self._has_begun or self._used >= len(self.stamps):
            return None
        write_stamp(self.stamps, self._used)
        self._used += 1
        return self._used - 1

    @property
    def cuts(self) -> list[Cut]:
        """Of the step that was launched last: its own, or those of the graph that was replayed."""
        return self._cuts or self._captured

    def write(self, step: int, cuts: list[Cut], stamps: Times, waited_ns: Times) -> None:
        """The slices of a step whose stamps have arrived, with ``[L]`` wait times of its merges."""
        at = stamps - self._ahead_ns
        for row, what, first, last, args in cuts:
            start_ns, end_ns = int(at[first]), int(at[last])
            if what == "merge":
                answered_ns = min(start_ns + int(waited_ns[args["layer"]]), end_ns)
                self._tracer.add(row, "wait", start_ns, answered_ns, step=step, **args)
                start_ns = answered_ns
            self._tracer.add(row, what, start_ns, end_ns, step=step, **args)
