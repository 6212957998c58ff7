"""``sglang-scout report``: a timeline as a table, one JSON object, or a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_scout.cli.breakdown import PARTS, Breakdown, Lead, break_down
from sglang_scout.cli.table import columns, gb
from sglang_scout.cli.trace_file import Trace, read_trace
from sglang_scout.core.errors import ConfigError

AHEAD_SHARE = 0.5
"""From this share of overlap on, the worker is said to have computed ahead."""

_FACTS = ("policy", "layers", "budget_tokens", "precompute", "recall")


def run(path: str, *, as_json: bool, plot: str | None) -> int:
    """Prints the report of the timeline ``path`` and, if asked for, draws it. Returns 0.

    Raises:
        ConfigError: no such timeline, or the plot cannot be made; says what to do.
    """
    trace = read_trace(path)
    found = break_down(trace)
    if plot is not None:
        _draw(found, trace, plot)
    print(json.dumps(as_dict(found, trace)) if as_json else as_text(found, trace))
    return 0


def as_dict(found: Breakdown, trace: Trace) -> dict[str, Any]:
    """The report as plain numbers, times in microseconds; means per step but for ``copies``."""
    return {
        "trace": trace.path,
        **{name: trace.facts[name] for name in _FACTS if name in trace.facts},
        "worker_events_lost": trace.events_lost,
        **asdict(found),
        "worker_busy_share": found.worker_busy_us / found.step_us,
        "ahead_share": found.ahead_share,
        "ahead_sentence": ahead_sentence(found),
    }


def as_text(found: Breakdown, trace: Trace) -> str:
    """The report for people."""
    known = ", ".join(f"{n} {trace.facts[n]}" for n in _FACTS if n in trace.facts)
    blocks = [f"{trace.path}: {found.steps} whole steps ({known})", _parts(found)]
    blocks += [_worker(found), _copies(found), _leads(found.leads), ahead_sentence(found)]
    if trace.events_lost:
        blocks.append(
            f"{trace.events_lost} events of the worker are lost: its busy times are too small."
        )
    return "\n\n".join(block for block in blocks if block)


def ahead_sentence(found: Breakdown) -> str:
    """Whether the worker computed layer l+1 while layer l ran."""
    share = found.ahead_share
    if share is None:
        return "The worker computed nothing in these steps, but perhaps layer 0."
    did = "computed" if share >= AHEAD_SHARE else "did not compute"
    return (
        f"The worker {did} layer l+1 while layer l ran: {_percent(share)} of its time for the layers "
        "from 1 on lies within the layer before."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _us(value: float) -> str:
    return f"{value:.0f}"


def _parts(found: Breakdown) -> str:
    rows: list[tuple[str, ...]] = [("decode step", "us", "share")]
    for key, text in PARTS.items():
        us = found.parts_us[key]
        if us or key not in ("fallback", "verify"):
            rows.append((text, _us(us), _percent(us / found.step_us)))
    rows.append(("whole step", _us(found.step_us), _percent(1)))
    if found.between_us is not None:
        rows.append(("until the next one begins", _us(found.between_us), ""))
    return columns(rows, right=(1, 2))


def _worker(found: Breakdown) -> str:
    if not found.thread_busy_us:
        return "The worker was idle in these steps."
    rows: list[tuple[str, ...]] = [("worker busy, per step", "us", "of the step")]
    for name, us in found.thread_busy_us.items():
        rows.append((name.removeprefix("worker "), _us(us), _percent(us / found.step_us)))
    us = found.worker_busy_us
    rows.append(("any thread", _us(us), _percent(us / found.step_us)))
    return columns(rows, right=(1, 2))


def _copies(found: Breakdown) -> str:
    rows: list[tuple[str, ...]] = [
        ("copies, all steps", "number", "pages", "bytes", "us", "GB/s", "while layers ran")
    ]
    for c in found.copies:
        speed = f"{c.bytes / c.us / 1e3:.2f}" if c.us else ""
        hidden = _percent(c.within_layers_us / c.us) if c.us else ""
        row = (str(c.copies), str(c.pages), gb(c.bytes), _us(c.us), speed, hidden)
        rows.append((c.kind, *row))
    return columns(rows, right=range(1, 7)) if len(rows) > 1 else "No page was copied."


def _leads(leads: list[Lead]) -> str:
    if not leads:
        return ""
    rows: list[tuple[str, ...]] = [
        ("answer ready before need, us", "answers", "in time", "min", "p10", "median", "p90", "max",
         "mean wait"),
    ]  # fmt: skip
    for lead in leads:
        times = (lead.min_us, lead.p10_us, lead.median_us, lead.p90_us, lead.max_us, lead.wait_us)
        name = f"layer {lead.layer}" + (" (no layer before it)" if lead.layer == 0 else "")
        share = _percent(lead.in_time / lead.answers)
        rows.append((name, str(lead.answers), share, *map(_us, times)))
    return columns(rows, right=range(1, 9))


def _draw(found: Breakdown, trace: Trace, target: str) -> None:
    from sglang_scout.cli import report_plot  # matplotlib takes a second to import

    try:
        report_plot.draw(found, trace, Path(target))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"report: --plot {target}: {error}; name a .png, .svg or .pdf in a folder that exists"
        ) from error
