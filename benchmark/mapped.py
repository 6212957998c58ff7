"""Waiting until a worker has mapped its arena, which it does behind its work (``worker/populate.py``)."""

from __future__ import annotations

import re
import time
from pathlib import Path

_POLL_S = 0.1
_ENOUGH = 0.99


def mapped_bytes(pid: int) -> int:
    """Shared memory that a process has mapped: of a worker, its arena. 0 where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.findall(r"^(?:RssShmem|HugetlbPages):\s+(\d+) kB$", text, re.MULTILINE)
    return sum(1024 * int(number) for number in found)


def wait_mapped(pid: int | None, nbytes: int, most_s: float) -> float:
    """Wait until a worker has mapped ``nbytes``, no longer than ``most_s``. Returns the share that it has, 0..1.

    Until then its threads wait for faults, and for the thread that maps, in between.
    """
    end = time.monotonic() + most_s
    while True:
        share = min(1.0, mapped_bytes(pid) / nbytes) if pid is not None else 0.0
        if share >= _ENOUGH or time.monotonic() >= end:
            return round(share, 3)
        time.sleep(_POLL_S)
