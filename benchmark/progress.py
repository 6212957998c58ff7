"""A line that says how far a long command is, on standard error."""

from __future__ import annotations

import sys
import time

PLAIN_PERIOD_S = 5.0


class Progress:
    """Rewrites one line on a terminal; elsewhere prints a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._last_s = -PLAIN_PERIOD_S
        self._open_line = False
        self._last_text = ""

    def say(self, text: str) -> None:
        """A line of its own, with the time since the start."""
        self._end_line()
        print(f"[{self._now():6.1f} s] {text}", file=sys.stderr, flush=True)

    def update(self, text: str) -> None:
        """The state of what goes on; may come often."""
        if self._is_terminal:
            print(f"\r\033[K[{self._now():6.1f} s] {text}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        elif text != self._last_text and self._now() - self._last_s >= PLAIN_PERIOD_S:
            self._last_s, self._last_text = self._now(), text
            self.say(text)

    def _end_line(self) -> None:
        if self._open_line:
            print(file=sys.stderr)
            self._open_line = False

    def _now(self) -> float:
        return time.monotonic() - self._begin
