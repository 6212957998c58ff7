"""Waiting until an attention process has mapped its arena, in the background (``worker.main.map_pages``)."""

from __future__ import annotations

import re
import time
from pathlib import Path

_POLL_S = 0.1
_ENOUGH = 0.99


def mapped_bytes(pid: int) -> int:
    """Shared memory mapped by a process; for an attention process, its arena. 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.findall(r"^(?:RssShmem|HugetlbPages):\s+(\d+) kB$", text, re.MULTILINE)
    return sum(1024 * int(number) for number in found)


def wait_mapped(pid: int | None, nbytes: int, max_s: float) -> float:
    """Wait until the process has mapped ``nbytes``, at most ``max_s``. Returns the mapped share, 0..1.

    Until then its threads are slowed by page faults and by contention with the populating thread.
    """
    end = time.monotonic() + max_s
    while True:
        share = min(1.0, mapped_bytes(pid) / nbytes) if pid is not None else 0.0
        if share >= _ENOUGH or time.monotonic() >= end:
            return round(share, 3)
        time.sleep(_POLL_S)
