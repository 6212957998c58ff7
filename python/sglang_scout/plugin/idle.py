"""With SGLang's ``--sleep-on-idle``: no busy polling while requests are in transfer."""

from __future__ import annotations

from typing import Any

POLL_MS = 1


def before_on_idle(scheduler: Any) -> None:
    """There is no batch to run. SGLang sleeps only if it holds no request either; a server whose requests wait for the
    other server would busy-poll, on a core that the other server or an attention process may need."""
    if scheduler.idle_sleeper is not None and not scheduler.is_fully_idle():
        scheduler.idle_sleeper.poller.poll(POLL_MS)  # ends at a message
