"""Asks the servers of several settings the same questions and counts what comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from benchmark.accuracy import tasks
from benchmark.accuracy.policies import Setting
from benchmark.accuracy.questions import is_right, payload
from benchmark.accuracy.scoring import wilson_interval
from benchmark.rows import Row

COUNTED = ("steps", "selected_pages", "cpu_pages", "recalled_pages", "fallback_pages")


class Servers(Protocol):
    def ask(self, setting: Setting, payload: dict[str, Any]) -> dict[str, Any]: ...

    def counters(self, setting: Setting) -> dict[str, Any]: ...


class Tally:
    """What one setting has answered of one length and task so far."""

    def __init__(self, setting: Setting, samples: int, before: dict[str, Any]) -> None:
        self.setting = setting
        self.outcomes: list[bool | None] = [None] * samples
        self.seconds = 0.0
        self._before = before

    def row(self, after: dict[str, Any]) -> Row:
        right, asked = sum(map(bool, self.outcomes)), len(self.outcomes)
        low, high = wilson_interval(right, asked)
        spent = {key: after[key] - self._before[key] for key in COUNTED if key in after}
        return {
            "right": right,
            "asked": asked,
            "low": round(low, 5),
            "high": round(high, 5),
            "outcomes": "".join("1" if x else "0" for x in self.outcomes),
            "seconds": round(self.seconds, 2),
            "cpu_compute_ratio": cpu_ratio(self._before, after),
            "offload": spent,
        }


def cpu_ratio(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """CPU compute ratio of what happened between two states of the counters.

    A server reports the ratio and the pages since its start; the budget follows from both.
    """
    if not after:
        return None

    def budget_pages(state: dict[str, Any]) -> float:
        ratio = state["cpu_compute_ratio"]
        return float(state["cpu_pages"]) / ratio if ratio else 0.0

    pages, budget = after["cpu_pages"] - before["cpu_pages"], budget_pages(after)
    budget -= budget_pages(before)
    return round(pages / budget, 5) if pages and budget > 0 else 0.0


def ask_all(servers: Servers, tallies: Sequence[Tally], samples: Sequence[tasks.Sample]) -> None:
    """Sample by sample, all settings one after the other, so that a text is prefilled once and asked about while it is
    still cached. Raises ValueError, RequestFailed, OSError or ServerFailed for the first request that fails.
    """
    for index, sample in enumerate(samples):
        for tally in tallies:
            begin = time.monotonic()
            answer = servers.ask(tally.setting, payload(sample))
            tally.seconds += time.monotonic() - begin
            tally.outcomes[index] = is_right(sample, answer)
