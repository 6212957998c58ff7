"""Timeline of decode steps in the Chrome trace event format, which Perfetto opens.

Rows of the decode server, from its scheduler thread or its copy thread:

    device     one slice per layer and step, from the layer's input to the next layer's
    attention  attend, wait for CPU attention, fallback (pages that the server computed in its place), merge
    ahead      predict, score, select and post, of the named layer, not the running one
    boundary   what the host decides between two steps
    copies     recall and fill (behind a step), load (before one), with layers, pages and bytes

and one for each thread of each incarnation of the CPU attention process, with the slice per layer and step that it
recorded itself (sgl-kernel/src/ring.h, Event). Arrows go from a post over these to the merge. Rows never nest:
overlapping slices go to separate rows. Each step boundary appends the slices of the previous step to the file, a JSON
array, which may lack its closing bracket: a killed server loses only the step in progress.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from sglang_scout.engine import Ids
from sglang_scout.engine.device import write_stamp
from sglang_scout.worker.client import WorkerClient

logger = logging.getLogger(__name__)

ROWS = ("device", "attention", "ahead", "boundary", "copies")
_SERVER_PID = 1  # Ids of rows and row groups; the real process ids are in their names.
_WORKER_PID = 100
_LANES = 1000
_NOTHING = contextlib.nullcontext()
_ARROWS = {"post": (False, True), "answer": (True, True), "merge": (True, False)}
"""Into a slice and out of it: from a layer's post over the CPU's slices of it to its merge."""

STAMPS_PER_LAYER = 24
_CALIBRATIONS = 8


class _Slice(NamedTuple):
    pid: int
    tid: int
    row: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Tracer:
    """Writes slices; a no-op without a file.

    Args:
        worker: polled for its events at every step, or None.
        facts: metadata of the server, for example its policy; JSON values.
    """

    def __init__(
        self,
        path: str | None,
        max_steps: int,
        worker: WorkerClient | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._path, self._max_steps, self._worker = path, max_steps, worker
        self._labels = ", ".join(f"{name} {value}" for name, value in (facts or {}).items())
        self._start_ns = time.monotonic_ns()
        self._first_step = self._step = 0
        self._slices: deque[_Slice] = deque()  # the copy thread appends too
        self._file: IO[str] | None = None
        self._free_at: dict[tuple[int, int], int] = {}  # row: end of its last slice
        self._events_lost = 0
        self._writing = threading.RLock()
        self.active = path is not None
        if self.active and worker is not None:
            worker.record_events(True)

    def step(self, step: int) -> None:
        """Decode step ``step`` begins."""
        if not self.active:
            return
        self._first_step = self._first_step or step
        if step >= self._first_step + self._max_steps:
            self.write()
            return
        self._append()
        self._step = step

    def add(self, row: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record one slice; times from ``time.monotonic_ns``. A ``layer`` in args ends the name."""
        if not self._step or not self.active:  # before the first step: warm-up
            return
        if "layer" in args:
            name = f"{name} {args['layer']}"
        args.setdefault("step", self._step)
        self._slices.append(_Slice(_SERVER_PID, ROWS.index(row), row, name, start_ns, end_ns, args))

    def slice(self, row: str, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """Record the time spent inside the ``with`` block."""
        return self._slice(row, name, args) if self.active else _NOTHING

    @contextlib.contextmanager
    def _slice(self, row: str, name: str, args: dict[str, Any]) -> Iterator[None]:
        start_ns, step = time.monotonic_ns(), self._step
        try:
            yield
        finally:
            self.add(row, name, start_ns, time.monotonic_ns(), step=step, **args)

    def write(self) -> None:
        """Write the remaining slices and stop tracing."""
        with self._writing:
            if self.active:
                self._append()
            if not self.active:
                return  # perhaps it could not be written
            self._close()
            what = "trace of %d steps written to %s; %d events of CPU attention were lost"
            steps = self._step - self._first_step + 1 if self._first_step else 0
            logger.info(what, steps, self._path, self._events_lost)

    def _append(self) -> None:
        with self._writing:
            slices = [self._slices.popleft() for _ in range(len(self._slices))]
            slices += self._worker_slices()
            events = [e for s in sorted(slices, key=lambda s: s.start_ns) for e in self._events(s)]
            try:
                if self._file is None:
                    about = _metadata(_SERVER_PID, 0, "process_labels", labels=self._labels)
                    self._file = open(self._path, "w", encoding="utf-8")
                    self._file.write("[\n" + json.dumps(about))
                self._file.write("".join(",\n" + json.dumps(event) for event in events))
                self._file.flush()
            except (OSError, ValueError) as error:
                # Keep serving: a failed trace must not fail requests.
                logger.error("cannot write the trace %s: %s; it ends here", self._path, error)
                self._close()

    def _close(self) -> None:
        self.active = False
        if self._worker is not None:
            self._worker.record_events(False)
        if self._file is not None:
            with contextlib.suppress(OSError), self._file:
                self._file.write("\n]\n")

    def _worker_slices(self) -> Iterator[_Slice]:
        """New events of CPU attention as slices, but for impossible ones: any process of the user can write them."""
        if self._worker is None:
            return
        taken, lost = self._worker.take_events()
        self._events_lost += lost
        for thread in taken:
            row = f"attention thread {thread.thread} (CPU {thread.cpu})"
            events = thread.events
            good = (events["step"] >= self._first_step) & (events["step"] <= self._step)
            good &= events["begin_ns"] >= self._start_ns
            self._events_lost += int(len(events) - np.count_nonzero(good))
            for event in events[good]:
                pid = _WORKER_PID + (int(event["seq"]) >> 40)
                args = {name: int(event[name]) for name in ("layer", "pages", "items", "step")}
                times = int(event["begin_ns"]), int(event["end_ns"])
                yield _Slice(pid, thread.thread, row, f"layer {args['layer']}", *times, args)

    def _events(self, s: _Slice) -> Iterator[dict[str, Any]]:
        """A slice as an event, preceded by the metadata of its row if new. If it overlaps with its row's last one, it
        goes to another lane of the row."""
        row = s.pid, s.tid
        while self._free_at.get(row, 0) > s.start_ns:
            row = s.pid, row[1] + _LANES
        if row not in self._free_at:
            group = f"CPU attention process, incarnation {s.pid - _WORKER_PID}"
            if s.pid == _SERVER_PID:
                group = f"decode server (pid {os.getpid()})"
            yield _metadata(*row, "process_name", name=group)
            yield _metadata(*row, "process_sort_index", sort_index=s.pid)
            name = s.row if row[1] == s.tid else f"{s.row} (overlapping)"
            yield _metadata(*row, "thread_name", name=name)
            lane = row[1] // _LANES  # a row's lanes are adjacent
            yield _metadata(*row, "thread_sort_index", sort_index=s.tid * _LANES + lane)
        self._free_at[row] = s.end_ns
        # Relative to the start of the trace: a double then holds every nanosecond.
        times = {"ts": (s.start_ns - self._start_ns) / 1e3, "dur": (s.end_ns - s.start_ns) / 1e3}
        event = {"name": s.name, "ph": "X", "pid": row[0], "tid": row[1], "args": s.args} | times
        kind = "answer" if s.pid >= _WORKER_PID else s.name.partition(" ")[0]
        if kind in _ARROWS:
            event["bind_id"] = hex(s.args["step"] << 16 | s.args["layer"])
            event["flow_in"], event["flow_out"] = _ARROWS[kind]
        yield event


def _metadata(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


Cut = tuple[str, str, int, int, dict[str, Any]]
"""A slice between two stamps: row, name, start, end and args."""


class DeviceClock:
    """Device timestamps of the parts of a step: the timeline of a step that the host only launches.

    A slice's ends are kernels that write the device's clock to the next words of ``stamps`` ``[words]`` int64, in a
    captured graph at every replay. They are read back with the step's results, two boundaries later.

    Attributes:
        cuts: of the layers launched or captured last. All steps that are not dense launch the same.
    """

    def __init__(self, tracer: Tracer, layers: int, device: torch.device) -> None:
        self._tracer = tracer
        self.stamps = torch.zeros(layers * STAMPS_PER_LAYER, dtype=torch.int64, device=device)
        self.cuts: list[Cut] = []
        self._used = len(self.stamps)  # nothing is recorded
        # By how much the device's clock is ahead of the host's, from the fastest of several tries.
        _, self._ahead_ns = min(self._compare() for _ in range(_CALIBRATIONS))

    def _compare(self) -> tuple[int, int]:
        """How long it took, and by how much the device's clock was ahead."""
        before = time.monotonic_ns()
        write_stamp(self.stamps, 0)
        there = int(self.stamps[0])  # waits for it
        after = time.monotonic_ns()
        return after - before, there - (before + after) // 2

    def begin_layers(self, is_dense: bool) -> None:
        """The first layer of a step, or of a capture, follows; those of dense steps are not recorded."""
        self._used = len(self.stamps) if is_dense else 0
        if not is_dense:
            self.cuts = []

    @contextlib.contextmanager
    def slice(self, row: str, name: str, **args: Any) -> Iterator[None]:
        """As :meth:`Tracer.slice`, of what is launched inside the ``with`` block."""
        start = self._stamp()
        yield
        if start is not None and (end := self._stamp()) is not None:
            self.cuts.append((row, name, start, end, args))

    def _stamp(self) -> int | None:
        """The index of a new stamp; None where nothing is recorded."""
        if self._used >= len(self.stamps):
            return None
        write_stamp(self.stamps, self._used)
        self._used += 1
        return self._used - 1

    def write(self, step: int, cuts: list[Cut], stamps: Ids, waited_ns: Ids) -> None:
        """The slices of a step whose stamps have arrived, with ``[L]`` wait times of its merges."""
        at = stamps - self._ahead_ns
        for row, what, first, last, args in cuts:
            start_ns, end_ns = int(at[first]), int(at[last])
            if what == "merge":
                answered_ns = min(start_ns + int(waited_ns[args["layer"]]), end_ns)
                self._tracer.add(row, "wait", start_ns, answered_ns, step=step, **args)
                start_ns = answered_ns
            self._tracer.add(row, what, start_ns, end_ns, step=step, **args)
