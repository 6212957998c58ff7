"""Read bandwidth of this machine: read_loop.cpp, compiled here and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("read_loop.cpp")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "benchmark"


class ReadLoopError(RuntimeError):
    """The read loop cannot be compiled here; the message says why."""


class ReadLoop:
    """Reads pages on threads pinned to the given CPUs."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._library = ctypes.CDLL(str(compiled()))
        self._library.scout_read_pages.restype = ctypes.c_int64
        self._cpus = np.asarray(cpus, np.int32)

    def pages_ns(
        self, k: int, v: int, page_bytes: int, ids: np.ndarray, threads: int
    ) -> tuple[int, int]:
        """Reads K and V of the pages in the order of ``ids`` int32 [n].

        Returns:
            (nanoseconds, XOR of all 64-bit words read).
        """
        assert ids.dtype == np.int32 and ids.flags.c_contiguous and page_bytes % 512 == 0
        checksum = ctypes.c_uint64()
        pages = ctypes.c_void_p(ids.ctypes.data), ctypes.c_int64(len(ids))
        cpus = ctypes.c_void_p(self._cpus.ctypes.data), ctypes.c_int32(threads)
        planes = ctypes.c_void_p(k), ctypes.c_void_p(v), ctypes.c_int64(page_bytes)
        ns = self._library.scout_read_pages(*planes, *pages, *cpus, ctypes.byref(checksum))
        return int(ns), checksum.value


def compiled() -> Path:
    """The shared library of read_loop.cpp for this machine, built if not cached.

    Raises:
        ReadLoopError: no compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise ReadLoopError(f"{compiler[0]} is not there; {SOURCE.name} needs a C++ compiler")
    command = [*compiler, "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    # The cache key includes the CPU, because of -march=native.
    flags = next(
        (x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")), ""
    )
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([*command, flags]).encode()).hexdigest()
    library = CACHE / f"{SOURCE.stem}-{key[:16]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}.part")
        done = subprocess.run(
            [*command, "-o", str(part), str(SOURCE)], capture_output=True, text=True, timeout=120
        )
        if done.returncode != 0:
            raise ReadLoopError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
        part.replace(library)
    return library
