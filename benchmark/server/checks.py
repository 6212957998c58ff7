"""Checks of a program that ends in time: each has a row, also those that there was no time for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from benchmark import rows


class OutOfTime(Exception):
    """--seconds do not suffice for more."""


class TimeLimit:
    """What is left of --seconds."""

    def __init__(self, end: float) -> None:
        self._end = end

    def left_s(self, most_s: float = math.inf) -> float:
        """Seconds that something may take, ``most_s`` or less.

        Raises:
            OutOfTime: none.
        """
        self.needs(0.0)
        return min(most_s, self._end - time.monotonic())

    def needs(self, least_s: float) -> None:
        """Raises OutOfTime if there is not so much time left, or none."""
        left_s = self._end - time.monotonic()
        if left_s <= max(least_s, 0.1):
            raise OutOfTime(f"no time left: {max(left_s, 0.0):.0f} s")

    def blame(self, error: Exception) -> None:
        """Raises OutOfTime if an error came because the time was over."""
        if time.monotonic() > self._end - 1.0:
            raise OutOfTime(f"no time left: {error}"[-1000:]) from error


class Report:
    """Rows of the checks, each as soon as it is known, and one for each check that was not made."""

    def __init__(self, writer: rows.Writer, checks: Sequence[str]) -> None:
        self.failed = 0
        self._writer, self._open = writer, list(checks)

    def add(self, name: str, wrong: list[str], **more: Any) -> None:
        self._open.remove(name)
        self.failed += bool(wrong)
        self._writer.add("scout", "failed" if wrong else "ok", "; ".join(wrong)[:1000], check=name,
                         untimed=True, **more)  # fmt: skip
        print(f"{name}: {'; '.join(wrong) or 'ok'} {more or ''}", flush=True)

    def skip(self, name: str, reason: str) -> None:
        self._open.remove(name)
        self._writer.add("scout", "skipped", reason, check=name, untimed=True)
        print(f"{name}: NOT RUN: {reason}", flush=True)

    def stop(self, error: Exception) -> None:
        """The next check failed by ``error``; those behind it were not made."""
        if not self._open:
            self._open.append("end")
        name = self._open[0]
        self.add(name, [f"{type(error).__name__}: {error}"[-1000:]])
        self.skip_rest(f"{name} failed")

    def skip_rest(self, reason: str) -> None:
        for name in self._open.copy():
            self.skip(name, reason)
