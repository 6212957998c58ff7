"""How many GiB of host pages a machine with a CUDA device gives, before anything relies on it.

    python -m benchmark.host_probe --out FILE

Prints, as its last line, the GiB of host pages that a measurement should ask for. A row (format: rows.py) says how: a
process touched memory in steps of 2 GiB until it had enough, 12 s were over, or the machine had no more: reached_gb,
seconds, and what /proc said before and after; meminfo can start far below what there is.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmark import device, rows
from sglang_scout.worker.host_memory import populate_together

GIB = 2**30
STEP_BYTES, LEFT_BYTES, GROW_S = 2 * GIB, 3 * GIB, 4.0
"""Touched at a time; what must be available before each; how long the machine may take to grow."""
BESIDE_GB, TAKE_S, TYPICAL_GB, GROW_MOST_S = 18.0, 60.0, 100.0, 12.0
"""Memory for all else, how long taking the host pages may last, the most to ask for, and how long to find out."""


def meminfo() -> dict[str, float]:
    """GiB, by what says so."""
    text = Path("/proc/meminfo").read_text()
    found = {
        name: int(kib) / 2**20
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
        if name in ("MemTotal", "MemAvailable", "Balloon")
    }
    zones = Path("/proc/zoneinfo")
    if zones.exists():
        for name in ("present", "managed"):
            pages = re.findall(rf"^\s+{name}\s+(\d+)$", zones.read_text(), re.MULTILINE)
            found[f"zones_{name}"] = sum(map(int, pages)) * mmap.PAGESIZE / GIB
    return {name: round(value, 2) for name, value in found.items()}


def grow(max_gb: float, max_s: float) -> None:
    """Touch memory in steps, and print GiB and seconds after each. In a process of its own: it may be killed."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    kept: list[mmap.mmap] = []
    begin = time.monotonic()
    while (len(kept) + 1) * STEP_BYTES <= max_gb * GIB and time.monotonic() - begin < max_s:
        end = time.monotonic() + GROW_S
        while meminfo()["MemAvailable"] * GIB < LEFT_BYTES and time.monotonic() < end:
            time.sleep(0.1)
        memory = mmap.mmap(-1, STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if populate_together(address, STEP_BYTES):
            return
        kept.append(memory)
        print(len(kept) * STEP_BYTES / GIB, round(time.monotonic() - begin, 2), flush=True)


def host_pages_gb(writer: rows.Writer, max_gb: float, max_s: float) -> float:
    """GiB to ask for, by what :func:`grow` got; with a row."""
    before = meminfo()
    code = f"from benchmark.host_probe import grow; grow({max_gb}, {max_s})"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True).stdout.split()
    reached, took_s = map(float, said[-2:]) if said else (0.0, 1.0)
    ended_s = took_s >= max_s or reached + STEP_BYTES / GIB > max_gb  # not for want of memory
    most = TYPICAL_GB if ended_s else reached - BESIDE_GB
    asked = max(1.0, min(most, TYPICAL_GB, TAKE_S * reached / took_s) // 1)
    about = {"reached_gb": reached, "seconds": took_s, "refused": not ended_s, "host_gb": asked}
    writer.add("memory", untimed=True, **about, before=before, after=meminfo())
    print(f"memory: {about}; before {before}, after {meminfo()}", flush=True)
    return asked


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines file to append to")
    options = parser.parse_args()
    on_cuda = device.device() == "cuda"
    shared = rows.environment("host_probe", ("torch",), cuda=on_cuda)
    writer = rows.Writer(options.out, shared | {"device": device.name()}, append=True)
    asked = host_pages_gb(writer, TYPICAL_GB + BESIDE_GB, GROW_MOST_S)
    writer.close()
    print(f"{asked:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
