"""Timeline of decode steps in the Chrome trace event format, which Perfetto opens.

Rows of the decode server, each a part of what its thread or its copy thread did:

    device     one slice per layer and step, from the layer's input to the next one's
    attention  attend, wait for the worker, fallback (pages that the server computed in its place), merge
    ahead      predict, score, select and post, of the layer that is named, not the one that runs
    boundary   what the host decides between two steps
    copies     recall and fill (behind a step), load (before one), with layers, pages and bytes

and one row for each thread of each life of the worker, with a slice per layer and step: what the
thread itself wrote down (sgl-kernel/src/ring.h, Event), not what the server saw of it. Arrows go from
a post over the worker's slices to the merge. Rows never nest: what runs at the same time as another
slice of its row goes to a row of its own.

Slices are kept in memory and written once, when the asked number of steps is complete or the server
stops, so tracing adds no file access to a step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglang_scout.core.formats import TRACE

logger = logging.getLogger(__name__)

ROWS = ("device", "attention", "ahead", "boundary", "copies")
_SERVER_PID = 1  # Numbers of rows and groups of rows; the real process ids are in their names.
_WORKER_PID = 100
_LANES = 1000


class ThreadEvents(Protocol):
    """What one worker thread did: ``events`` has seq, step, layer, begin_ns, end_ns, items, pages."""

    @property
    def thread(self) -> int: ...
    @property
    def cpu(self) -> int: ...
    @property
    def events(self) -> npt.NDArray[Any]: ...


class WorkerLog(Protocol):
    """The worker's own record of its work; :class:`sglang_scout.worker.client.WorkerClient`."""

    def record_events(self, on: bool) -> None: ...

    def take_events(self) -> tuple[Sequence[ThreadEvents], int]: ...


class _Slice(NamedTuple):
    pid: int
    tid: int
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Tracer:
    """Collects slices; does nothing without a file.

    Args:
        path: output file, or None.
        max_steps: steps to record.
        worker: asked for its events at every step, or None.
        facts: what a reader should know of the server, for example its policy; JSON values.
    """

    def __init__(
        self,
        path: str | None,
        max_steps: int,
        worker: WorkerLog | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._max_steps = max_steps
        self._worker = worker
        self._facts = dict(facts or {})
        self._start_ns = time.monotonic_ns()
        self._first_step = self._step = 0
        self._slices: list[_Slice] = []  # list.append is atomic: the copy thread adds too
        self._worker_events: list[ThreadEvents] = []
        self._events_lost = 0
        self._closing = threading.Lock()
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
        self._take_worker_events()
        self._step = step

    def now(self) -> int:
        """Time in ns where tracing is on, else 0."""
        return time.monotonic_ns() if self.active else 0

    def cut(self, row: str, name: str, start_ns: int, **args: Any) -> int:
        """Record a slice from ``start_ns``, which came from :meth:`now` or from here, to now.

        Returns:
            Now, the start of what follows.
        """
        if not self.active:
            return 0
        end_ns = time.monotonic_ns()
        self.add(row, name, start_ns, end_ns, **args)
        return end_ns

    def add(self, row: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record one slice; times from ``time.monotonic_ns``. A ``layer`` in args ends the name."""
        if not self.active or start_ns == 0:
            return
        if "layer" in args:
            name = f"{name} {args['layer']}"
        args.setdefault("step", self._step)
        self._slices.append(_Slice(_SERVER_PID, ROWS.index(row), name, start_ns, end_ns, args))

    @contextlib.contextmanager
    def slice(self, row: str, name: str, **args: Any) -> Iterator[None]:
        """Record the time spent inside the ``with`` block."""
        start_ns, step = self.now(), self._step
        try:
            yield
        finally:
            self.cut(row, name, start_ns, step=step, **args)

    def write(self) -> None:
        """Write the file and stop tracing."""
        with self._closing:
            if not self.active or self._path is None:
                return
            self._take_worker_events()
            self.active = False
            if self._worker is not None:
                self._worker.record_events(False)
        text = json.dumps(self._document())
        target = Path(self._path)
        try:
            partial = target.with_name(target.name + ".part")
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
            logger.info("trace of %d steps written to %s", self._steps(), target)
        except (OSError, ValueError) as error:
            # Serving goes on: a trace is not worth a request.
            logger.error("cannot write the trace %s: %s", target, error)

    def _steps(self) -> int:
        return self._step - self._first_step + 1 if self._first_step else 0

    def _take_worker_events(self) -> None:
        if self._worker is not None:
            taken, lost = self._worker.take_events()
            self._worker_events.extend(taken)
            self._events_lost += lost

    def _document(self) -> dict[str, Any]:
        names: dict[tuple[int, int], str] = {(_SERVER_PID, i): row for i, row in enumerate(ROWS)}
        groups = {_SERVER_PID: f"decode server (pid {os.getpid()})"}
        slices = _in_lanes([*self._slices, *self._worker_slices(names, groups)], names)
        metadata = [_metadata("process_name", pid, 0, name=name) for pid, name in groups.items()]
        metadata += [_metadata("process_sort_index", pid, 0, sort_index=pid) for pid in groups]
        for (pid, tid), name in sorted(names.items()):
            metadata.append(_metadata("thread_name", pid, tid, name=name))
            sort_index = tid % _LANES * _LANES + tid // _LANES  # a row's lanes lie together
            metadata.append(_metadata("thread_sort_index", pid, tid, sort_index=sort_index))
        events = [
            {
                "name": s.name,
                "ph": "X",
                "pid": s.pid,
                "tid": s.tid,
                "ts": self._us(s.start_ns),
                "dur": (s.end_ns - s.start_ns) / 1e3,
                "args": s.args,
            }
            for s in slices
        ]
        about = {
            "format": TRACE.name,
            "version": TRACE.version,
            "steps": self._steps(),
            "worker_events_lost": self._events_lost,
            **self._facts,
        }
        return {
            "traceEvents": metadata + events + self._arrows(slices),
            "displayTimeUnit": "ms",
            "otherData": about,
        }

    def _us(self, time_ns: int) -> float:
        # From the start of the trace: a double then holds every nanosecond.
        return (time_ns - self._start_ns) / 1e3

    def _worker_slices(
        self, names: dict[tuple[int, int], str], groups: dict[int, str]
    ) -> list[_Slice]:
        """The worker's events as slices; adds their rows. What cannot be of this trace is dropped."""
        slices = []
        now_ns = time.monotonic_ns()
        for taken in self._worker_events:
            events = taken.events
            good = (events["step"] >= self._first_step) & (events["step"] <= self._step)
            good &= (events["begin_ns"] >= self._start_ns) & (events["end_ns"] <= now_ns)
            self._events_lost += int(len(events) - np.count_nonzero(good))
            for event in events[good]:
                life = int(event["seq"]) >> 40
                row = (_WORKER_PID + life, taken.thread)
                names[row] = f"worker thread {taken.thread} (CPU {taken.cpu})"
                groups[row[0]] = f"attention worker, life {life}"
                layer = int(event["layer"])
                args = {name: int(event[name]) for name in ("layer", "pages", "items", "step")}
                begin_ns, end_ns = int(event["begin_ns"]), int(event["end_ns"])
                slices.append(_Slice(*row, f"layer {layer}", begin_ns, end_ns, args))
        return slices

    def _arrows(self, slices: Sequence[_Slice]) -> list[dict[str, Any]]:
        """Post of a layer -> the worker's slices of it -> its merge."""
        ends: dict[tuple[int, int], dict[str, _Slice]] = {}
        answers: dict[tuple[int, int], list[_Slice]] = {}
        for s in slices:
            key = (s.args["step"], s.args.get("layer", -1))
            if s.pid >= _WORKER_PID:
                answers.setdefault(key, []).append(s)
            elif (kind := s.name.partition(" ")[0]) in ("post", "merge"):
                ends.setdefault(key, {})[kind] = s
        arrows = []
        for number, (key, answered) in enumerate(sorted(answers.items())):
            known = ends.get(key, {})
            if "post" not in known or "merge" not in known:
                continue
            answered = sorted(answered, key=lambda s: s.start_ns)
            path = [("s", known["post"]), *(("t", s) for s in answered), ("f", known["merge"])]
            arrows += [
                {
                    "name": "missing pages",
                    "cat": "answer",
                    "ph": phase,
                    "bp": "e",
                    "id": number,
                    "pid": s.pid,
                    "tid": s.tid,
                    "ts": self._us(s.start_ns),
                }
                for phase, s in path
            ]
        return arrows


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _in_lanes(slices: list[_Slice], names: dict[tuple[int, int], str]) -> list[_Slice]:
    """By start; a slice that begins before its row's last one ends goes to another row like it.

    Adds the rows that this takes to ``names``.
    """
    placed = []
    free_at: dict[tuple[int, int], int] = {}
    for s in sorted(slices, key=lambda s: (s.start_ns, s.end_ns)):
        lane = 0
        while free_at.get((s.pid, s.tid + lane * _LANES), s.start_ns) > s.start_ns:
            lane += 1
        row = (s.pid, s.tid + lane * _LANES)
        free_at[row] = s.end_ns
        if lane:
            names[row] = f"{names[(s.pid, s.tid)]}, beside"
        placed.append(s._replace(tid=row[1]))
    return placed
