"""nvidia-smi queries for the first device. Does not import torch."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence

ABOUT = ("name", "memory.total", "driver_version", "clocks.sm", "clocks.mem", "power.limit")
ABOUT += ("pcie.link.gen.current",)
_TIMEOUT_S = 20.0


def query(fields: Sequence[str]) -> dict[str, str]:
    """Its output per field, as printed; ``{"absent": REASON}`` if there is none."""
    if (program := shutil.which("nvidia-smi")) is None:
        return {"absent": "nvidia-smi is not installed"}
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"absent": f"nvidia-smi: {error}"}
    lines = done.stdout.splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if done.returncode != 0 or len(values) != len(fields):
        said = (done.stderr or done.stdout).strip()[-300:]
        return {"absent": f"nvidia-smi: status {done.returncode}: {said}"}
    return dict(zip(fields, values, strict=True))


def used_mib() -> int | None:
    """Device memory in use; None if not known."""
    said = query(["memory.used"]).get("memory.used", "").split()
    return int(said[0]) if said and said[0].isdecimal() else None


def wait_free(before_mib: int | None, max_s: float = 60.0) -> None:
    """Wait until memory use is back to about ``before_mib``: the driver frees memory some time after the process is
    gone."""
    end = time.monotonic() + max_s
    while before_mib is not None and (now := used_mib()) is not None and now > before_mib + 512:
        if time.monotonic() >= end:
            print("memory of the device is still taken", flush=True)
            return
        time.sleep(0.5)
