"""What nvidia-smi says of the first device. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence

ABOUT = ("name", "memory.total", "driver_version", "clocks.sm", "clocks.mem", "power.limit",
         "pcie.link.gen.current")  # fmt: skip
_TIMEOUT_S = 20.0


def query(fields: Sequence[str], *, units: bool = True) -> dict[str, str]:
    """Its answers as it prints them; ``{"absent": REASON}`` where there are none."""
    if (program := shutil.which("nvidia-smi")) is None:
        return {"absent": "nvidia-smi is not installed"}
    form = "csv,noheader" if units else "csv,noheader,nounits"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={','.join(fields)}", f"--format={form}"],
            capture_output=True, text=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"absent": f"nvidia-smi: {error}"}
    lines = done.stdout.splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if done.returncode != 0 or len(values) != len(fields):
        said = (done.stderr or done.stdout).strip()[-300:]
        return {"absent": f"nvidia-smi: status {done.returncode}: {said}"}
    return dict(zip(fields, values, strict=True))


def used_mib() -> int | None:
    """Memory of the device that is taken; None where that is not known."""
    try:
        return int(query(["memory.used"], units=False).get("memory.used", ""))
    except ValueError:
        return None


def wait_free(before_mib: int | None, most_s: float = 60.0) -> None:
    """Wait until no more memory is taken than ``before_mib`` and a little: the driver frees memory some time after
    its process is gone."""
    end = time.monotonic() + most_s
    while before_mib is not None and (now := used_mib()) is not None and now > before_mib + 512:
        if time.monotonic() >= end:
            print("memory of the device is still taken", flush=True)
            return
        time.sleep(0.5)
