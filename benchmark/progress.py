"""Progress lines of long commands, on standard error."""

from __future__ import annotations

import sys
import time

PERIOD_S = 5.0


class Progress:
    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._last_s = -PERIOD_S

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        now_s = time.monotonic() - self._begin
        print(f"[{now_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def update(self, text: str) -> None:
        """Updates the current state; may be called often, and is printed at intervals."""
        now_s = time.monotonic() - self._begin
        if now_s - self._last_s >= PERIOD_S:
            self._last_s = now_s
            self.say(text)
