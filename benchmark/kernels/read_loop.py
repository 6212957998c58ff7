"""Read bandwidth of this machine: read_loop.cpp, compiled here and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("read_loop.cpp")


class ReadLoopError(RuntimeError):
    """The read loop cannot be compiled here; the message says why."""


def compiled(folder: Path) -> Path:
    """The shared library of read_loop.cpp for this machine. Raises ReadLoopError: no compiler, or it fails."""
    library = folder / "read_loop.so"
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++17", "-O3", "-march=native"]
    command += ["-shared", "-fPIC", "-pthread", "-o", str(library), str(SOURCE)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise ReadLoopError(f"{shlex.join(command)} failed: {said}"[-800:]) from None
    return library


class ReadLoop:
    """Reads pages on threads pinned to the given CPUs."""

    def __init__(self, cpus: Sequence[int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._library = ctypes.CDLL(str(compiled(Path(folder))))
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
