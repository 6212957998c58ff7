"""What a machine with a CUDA device can do for host pages, before anything relies on it.

    python -m benchmark.host_probe --out FILE

Prints, as its last line, the GiB of host pages that a measurement should ask for. Rows (format: rows.py):
    memory      a process touched memory in steps of 2 GiB until it had enough, 12 s were over, or the machine
                had no more: reached_gb, seconds, and what /proc said before and after; meminfo can start far below
                what there is
    lock        populating and page-locking 4 GiB of shared memory, by the page size that it got: populate_s, lock_s
    link        a copy from the host by the copy engine and back, and of pages of 64 KiB by a kernel: gb_per_s
    read        CPU threads reading pages of 64 KiB in random order: gb_per_s, threads
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark import device, rows
from benchmark.kernels.read_loop import ReadLoop
from sglang_scout.engine.device import lock_memory
from sglang_scout.ops import triton as kernels
from sglang_scout.ops.pages import LayerPages
from sglang_scout.worker.host_memory import populate_together, shmem_mode

GIB = 2**30
STEP_BYTES, LEFT_BYTES, GROW_S = 2 * GIB, 3 * GIB, 4.0
"""Touched at a time; what must be available before each; how long the machine may take to grow."""
BESIDE_GB, TAKE_S, TYPICAL_GB, GROW_MOST_S = 18.0, 60.0, 100.0, 12.0
"""Memory for all else, how long taking the host pages may last, the most to ask for, and how long to find out."""
LOCK_BYTES, LINK_BYTES = 4 * GIB, GIB
PAGE_BYTES = 2**16


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


def add_lock(writer: rows.Writer, nbytes: int, huge: bool) -> None:
    """Populate and lock a memory file, as an arena is, of small or of transparent huge pages."""
    fd = os.memfd_create("probe")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    os.close(fd)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    begin = time.monotonic()
    if error := populate_together(address, nbytes):
        raise OSError(error, os.strerror(error))
    populated = time.monotonic()
    unlock = lock_memory(address, nbytes) if device.device() == "cuda" else lambda: None
    locked = time.monotonic()
    unlock()
    shown = {"populate_s": round(populated - begin, 3), "lock_s": round(locked - populated, 3)}
    about = {"pages": "2m" if huge else "4k", "gb": nbytes / GIB, "shmem_enabled": shmem_mode()}
    writer.add("lock", untimed=True, **about, **shown)
    print(f"lock: {about} {shown}", flush=True)


def add_link(writer: rows.Writer, nbytes: int) -> None:
    count = nbytes // 2 // PAGE_BYTES
    host = torch.ones(2, 1, count, 1, 1, PAGE_BYTES // 2, dtype=torch.bfloat16)
    host = host.pin_memory() if device.device() == "cuda" else host
    to = torch.empty_like(host, device=device.device())
    order = torch.randperm(count)
    ids = torch.stack([torch.zeros_like(order), order, torch.arange(count)]).to(to.device)
    pages = LayerPages.of([host[0, 0]], [host[1, 0]], to.device)
    calls: dict[str, Callable[[], object]] = {
        "copy engine": lambda: to.copy_(host, non_blocking=True),
        "copy engine, back": lambda: host.copy_(to, non_blocking=True),
        "kernel": lambda: kernels.pages.copy_layer_pages(pages, ids, *to),
    }
    for name, call in calls.items():
        call()
        median_us = rows.percentile(device.times_us(call, 5), 50)
        rate = round(host.nbytes / median_us / 1e3, 1)
        writer.add("link", untimed=True, by=name, gb_per_s=rate)
        print(f"link: {name} {rate} GB/s", flush=True)


def add_read(writer: rows.Writer, nbytes: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    threads = max(1, len(cpus) - 2)
    loop, count = ReadLoop(cpus[-threads:]), nbytes // 2 // PAGE_BYTES
    k, v = np.ones((2, nbytes // 2), np.uint8)
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    taken = [
        loop.pages_ns(k.ctypes.data, v.ctypes.data, PAGE_BYTES, order, threads)[0] for _ in range(5)
    ]
    rate = round(nbytes / rows.percentile(taken, 50), 1)
    writer.add("read", untimed=True, threads=threads, gb_per_s=rate)
    print(f"read: {rate} GB/s by {threads} threads", flush=True)


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines file to append to")
    options = parser.parse_args()
    on_cuda = device.device() == "cuda"
    shared: dict[str, Any] = rows.environment("host_probe", ("torch",), cuda=on_cuda)
    writer = rows.Writer(options.out, shared | {"device": device.name()}, append=True)
    scale = 1 if on_cuda else 512  # smaller where nothing is measured
    asked = host_pages_gb(writer, TYPICAL_GB + BESIDE_GB, GROW_MOST_S)
    parts: list[tuple[Any, ...]] = [
        ("lock", add_lock, LOCK_BYTES // scale, False),
        ("lock", add_lock, LOCK_BYTES // scale, True),
        ("link", add_link, LINK_BYTES // scale),
        ("read", add_read, LINK_BYTES // scale),
    ]
    for name, part, *sizes in parts:
        try:
            part(writer, *sizes)
        except Exception as error:  # the others say something all the same
            writer.add(name, "failed", f"{type(error).__name__}: {error}"[:500])
            print(f"{name}: FAILED: {error}", flush=True)
    failed = any(row["status"] == "failed" for row in writer.rows)
    writer.close()
    print(f"{asked:g}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
