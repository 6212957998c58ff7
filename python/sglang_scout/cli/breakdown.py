"""Where the time of a decode step goes, from a timeline: the numbers of the paper's Figure 11.

All times are microseconds. A step lasts from the begin of its boundary to the end of its last layer;
what lies between two steps (sampling, scheduling) is told apart. Only whole steps count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_scout.cli.trace_file import Slice, Trace
from sglang_scout.core.errors import ConfigError

Span = tuple[float, float]

PARTS = {
    "boundary": "step boundary",
    "ahead": "prediction and selection",
    "attention": "device attention and merge",
    "rest": "rest of the layers",
    "wait": "wait for missing pages",
    "fallback": "missing pages, computed by the server",
    "verify": "verification",
    "outside": "before and between the layers",
}
"""Parts of a step by key; they are disjoint and add up to it."""

_PART_OF = {
    "attend": "attention",
    "merge": "attention",
    "wait": "wait",
    "fallback": "fallback",
    "verify": "verify",
}
"""Part of the slices on the row attention, by kind."""


@dataclass(frozen=True)
class Lead:
    """How long before need the answers of one layer were ready; negative: so much too late."""

    layer: int
    answers: int
    in_time: int
    min_us: float
    p10_us: float
    median_us: float
    p90_us: float
    max_us: float
    wait_us: float  # mean wait at the merge


@dataclass(frozen=True)
class CopyTotals:
    """Copies of one kind: recall and fill (behind a step) or load (before one)."""

    kind: str
    copies: int
    pages: int
    bytes: int
    us: float
    within_layers_us: float  # while layers of some step ran


@dataclass(frozen=True)
class Breakdown:
    """Everything that the report prints. Times of parts, threads and union are means per step.

    Attributes:
        steps: whole steps.
        step_us: mean length of a step.
        between_us: mean time from a step to the next one, None if none follows another.
        parts_us: keys of PARTS.
        thread_busy_us: busy time of each worker thread within steps.
        worker_busy_us: of at least one thread.
        copies: totals over all steps.
        leads: by layer; layers without an answer of the worker are left out.
        ahead_us, ahead_overlap_us: worker time for layers from 1 on, and the part of it within the
            layer before; sums over all steps.
    """

    steps: int
    step_us: float
    between_us: float | None
    parts_us: dict[str, float]
    thread_busy_us: dict[str, float]
    worker_busy_us: float
    copies: list[CopyTotals]
    leads: list[Lead]
    ahead_us: float
    ahead_overlap_us: float

    @property
    def ahead_share(self) -> float | None:
        """Share of the worker's time for layer l+1 that lies within layer l; None without any."""
        return self.ahead_overlap_us / self.ahead_us if self.ahead_us else None


def break_down(trace: Trace) -> Breakdown:
    """The breakdown of a timeline.

    Raises:
        ConfigError: there is no whole step in it.
    """
    by_step: dict[int, list[Slice]] = defaultdict(list)
    for s in trace.slices:
        by_step[s.step].append(s)
    steps = {n: part for n, part in sorted(by_step.items()) if _is_whole(part, trace.layers)}
    if not steps:
        raise ConfigError(
            f"report: {trace.path} has no whole decode step; record it again with requests running"
        )
    spans = {n: _step_span(part) for n, part in steps.items()}
    count = len(steps)
    parts = dict.fromkeys(PARTS, 0.0)
    for number, part in steps.items():
        for key, us in _parts_of(part, spans[number]).items():
            parts[key] += us / count
    worker = [s for part in steps.values() for s in part if s.by_worker]
    threads: dict[str, list[Span]] = defaultdict(list)
    for s in worker:
        threads[s.row].append((s.start_us, s.end_us))
    all_steps = list(spans.values())
    gaps = [spans[n + 1][0] - spans[n][1] for n in spans if n + 1 in spans]
    ahead_us, overlap_us = _ahead(steps)
    return Breakdown(
        steps=count,
        step_us=sum(end - start for start, end in all_steps) / count,
        between_us=sum(gaps) / len(gaps) if gaps else None,
        parts_us=parts,
        thread_busy_us={
            name: common_us(busy, all_steps) / count for name, busy in sorted(threads.items())
        },
        worker_busy_us=common_us([b for busy in threads.values() for b in busy], all_steps) / count,
        copies=_copies(trace.slices, steps),
        leads=_leads(steps),
        ahead_us=ahead_us,
        ahead_overlap_us=overlap_us,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common_us(a: Iterable[Span], b: Iterable[Span]) -> float:
    """Length of the time that lies in some span of ``a`` and in some span of ``b``."""
    left, right = union(a), union(b)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, with linear interpolation between neighbours."""
    at = (len(values) - 1) * share
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def _is_whole(part: Sequence[Slice], layers: int) -> bool:
    ran = sorted(s.layer for s in part if s.row == "device")
    return ran == list(range(layers)) and any(s.row == "boundary" for s in part)


def _step_span(part: Sequence[Slice]) -> Span:
    own = [s for s in part if s.row in ("boundary", "device")]
    return min(s.start_us for s in own), max(s.end_us for s in own)


def _parts_of(part: Sequence[Slice], span: Span) -> dict[str, float]:
    us = dict.fromkeys(PARTS, 0.0)
    layers = 0.0
    for s in part:
        if s.row == "device":
            layers += s.us
        elif s.row in ("boundary", "ahead"):
            us[s.row] += s.us
        elif s.row == "attention" and s.kind in _PART_OF:
            us[_PART_OF[s.kind]] += s.us
    inside = ("ahead", "attention", "wait", "fallback", "verify")
    us["rest"] = layers - sum(us[key] for key in inside)
    us["outside"] = span[1] - span[0] - us["boundary"] - layers
    return us


def _copies(slices: Sequence[Slice], steps: dict[int, list[Slice]]) -> list[CopyTotals]:
    layers = [(s.start_us, s.end_us) for part in steps.values() for s in part if s.row == "device"]
    totals = []
    own = [s for s in slices if s.row == "copies" and s.pages and s.step in steps]
    for kind in sorted({s.kind for s in own}):
        copies = [s for s in own if s.kind == kind]
        totals.append(
            CopyTotals(
                kind=kind,
                copies=len(copies),
                pages=sum(s.pages for s in copies),
                bytes=sum(s.bytes for s in copies),
                us=sum(s.us for s in copies),
                within_layers_us=common_us([(s.start_us, s.end_us) for s in copies], layers),
            )
        )
    return totals


def _leads(steps: dict[int, list[Slice]]) -> list[Lead]:
    leads: dict[int, list[float]] = defaultdict(list)
    waits: dict[int, list[float]] = defaultdict(list)
    for part in steps.values():
        ready: dict[int, float] = {}
        for s in part:
            if s.by_worker:
                ready[s.layer] = max(ready.get(s.layer, s.end_us), s.end_us)
        fallen = {s.layer for s in part if s.kind == "fallback"}
        for s in part:
            if (
                (s.row, s.kind) == ("attention", "wait")
                and s.layer in ready
                and s.layer not in fallen
            ):
                leads[s.layer].append(s.start_us - ready[s.layer])
                waits[s.layer].append(s.us)
    result = []
    for layer, values in sorted(leads.items()):
        values.sort()
        result.append(
            Lead(
                layer=layer,
                answers=len(values),
                in_time=sum(v >= 0 for v in values),
                min_us=values[0],
                p10_us=quantile(values, 0.1),
                median_us=quantile(values, 0.5),
                p90_us=quantile(values, 0.9),
                max_us=values[-1],
                wait_us=sum(waits[layer]) / len(values),
            )
        )
    return result


def _ahead(steps: dict[int, list[Slice]]) -> tuple[float, float]:
    """Worker time for layers from 1 on, and how much of it lies within the layer before."""
    total = overlap = 0.0
    for part in steps.values():
        layers = {s.layer: (s.start_us, s.end_us) for s in part if s.row == "device"}
        for s in part:
            if s.by_worker and s.layer >= 1:
                total += s.us
                overlap += common_us([(s.start_us, s.end_us)], [layers[s.layer - 1]])
    return total, overlap
