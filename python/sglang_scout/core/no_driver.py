"""A placeholder for the NVIDIA driver's library, with which SGLang's kernels are linked even for a CPU."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path


def stand_in_for_the_driver() -> None:
    """Without NVIDIA's driver, load a ``libcuda.so.1`` that knows no device: here, and in the processes
    that this one starts, as these import kernels before SGLang loads plugins."""
    if os.path.exists("/dev/nvidiactl"):
        return  # a driver without its library is an error
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        native = find_spec("sglang_scout._native")  # is installed beside it
        stub = Path((native and native.origin) or "").parent / "no_driver" / "libcuda.so.1"
        ctypes.CDLL(str(stub))
        known = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = f"{stub.parent}:{known}" if known else str(stub.parent)
