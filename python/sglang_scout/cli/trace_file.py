"""Reads a timeline that ``{"trace": FILE}`` wrote (engine/trace.py says what is in it)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.formats import TRACE

_WORKER = "worker thread"
_FIX = """give a file that --kv-offload-config '{"trace": "FILE"}' made on a decode server"""


class Slice(NamedTuple):
    """A slice of the timeline; times in microseconds from the start of the trace.

    ``row`` is device, attention, ahead, boundary, copies, or a worker thread's name; ``kind`` is
    the first word of the slice's name; ``layer`` is -1 where there is none.
    """

    row: str
    kind: str
    layer: int
    step: int
    start_us: float
    end_us: float
    pages: int
    bytes: int

    @property
    def us(self) -> float:
        return self.end_us - self.start_us

    @property
    def by_worker(self) -> bool:
        return self.row.startswith(_WORKER)


@dataclass(frozen=True)
class Trace:
    """A checked timeline.

    Attributes:
        path: the file.
        layers: of the model.
        facts: what the server said of itself: policy, precompute, recall and others.
        events_lost: events of worker threads that are missing.
        slices: all of them, by start.
    """

    path: str
    layers: int
    facts: dict[str, Any]
    events_lost: int
    slices: Sequence[Slice]


def read_trace(path: str) -> Trace:
    """Reads and checks a timeline.

    Raises:
        ConfigError: the file cannot be read or is no such timeline; names the file and the fix.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"report: {path}: {error.strerror}; {_FIX}") from error
    except ValueError as error:
        raise ConfigError(f"report: {path} is not JSON ({error}); {_FIX}") from error
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("format") != TRACE.name:
        raise ConfigError(f"report: {path} is not a timeline of sglang-scout; {_FIX}")
    if about.get("version") != TRACE.version:
        raise ConfigError(
            f"report: {path} has version {about.get('version')!r}, this command reads version "
            f"{TRACE.version}; use the sglang-scout that the server ran with"
        )
    try:
        layers, lost = about["layers"], about["worker_events_lost"]
        if not isinstance(layers, int) or layers < 1 or not isinstance(lost, int):
            raise ValueError(f"layers = {layers!r}, worker_events_lost = {lost!r}")
        slices = _slices(document["traceEvents"], layers)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"report: {path} is damaged ({reason}); record it again") from error
    return Trace(path, layers, about, lost, slices)


def _slices(events: Any, layers: int) -> list[Slice]:
    if not isinstance(events, list):
        raise ValueError("traceEvents is no list")
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"].partition(",")[0]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    slices = []
    for number, event in enumerate(events):
        if event["ph"] != "X":
            continue
        args = event["args"]
        start_us, us = float(event["ts"]), float(event["dur"])
        layer = args.get("layer", -1)
        if not (math.isfinite(start_us) and math.isfinite(us) and us >= 0):
            raise ValueError(f"event {number}: ts {event['ts']}, dur {event['dur']}")
        if (event["pid"], event["tid"]) not in rows:
            raise ValueError(f"event {number} is of a row without a name")
        if not -1 <= layer < layers:
            raise ValueError(f"event {number}: layer {layer} of {layers}")
        slices.append(
            Slice(
                row=rows[(event["pid"], event["tid"])],
                kind=event["name"].partition(" ")[0],
                layer=layer,
                step=int(args["step"]),
                start_us=start_us,
                end_us=start_us + us,
                pages=int(args.get("pages", 0)),
                bytes=int(args.get("bytes", 0)),
            )
        )
    return sorted(slices, key=lambda s: (s.start_us, s.end_us))
