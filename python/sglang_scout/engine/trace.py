"""Timeline of decode steps in the Chrome trace event format, which Perfetto opens.

One row per device: ``device`` (layers, attention, merge waits), ``copies`` (recall), ``worker`` (from
the ring: posted to answered). The file is written once, when the asked number of steps is complete
or the server stops, so tracing adds no file access to a step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ROWS = ("device", "attention", "worker", "copies")


class Tracer:
    """Collects slices; does nothing without a file.

    Args:
        path: output file, or None.
        max_steps: steps to record.
    """

    def __init__(self, path: str | None, max_steps: int) -> None:
        self._path = path
        self._max_steps = max_steps
        self._steps = 0
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.active = path is not None

    def step(self) -> None:
        """A decode step begins."""
        if not self.active:
            return
        self._steps += 1
        if self._steps > self._max_steps:
            self.write()

    def add(self, row: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record one slice; times from ``time.monotonic_ns``."""
        if not self.active:
            return
        event = {
            "name": name,
            "ph": "X",
            "pid": os.getpid(),
            "tid": ROWS.index(row),
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "args": {"step": self._steps, **args},
        }
        with self._lock:
            self._events.append(event)

    @contextlib.contextmanager
    def slice(self, row: str, name: str, **args: Any) -> Iterator[None]:
        """Record the time spent inside the ``with`` block."""
        if not self.active:
            yield
            return
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(row, name, start_ns, time.monotonic_ns(), **args)

    def write(self) -> None:
        """Write the file and stop tracing."""
        if not self.active or self._path is None:
            return
        self.active = False
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": i, "args": {"name": row}}
            for i, row in enumerate(ROWS)
        ]
        with self._lock:
            text = json.dumps({"traceEvents": names + self._events, "displayTimeUnit": "ms"})
        target = Path(self._path)
        try:
            partial = target.with_name(target.name + ".part")
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        except (OSError, ValueError) as error:
            # Serving goes on: a trace is not worth a request.
            logger.error("cannot write the trace %s: %s", target, error)
