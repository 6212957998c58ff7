"""A placeholder for the NVIDIA driver's library, with which SGLang's kernels are linked even for a CPU."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

from sglang_scout.core import numa


def stand_in_for_the_driver() -> None:
    """Without an NVIDIA GPU and its driver, load a ``libcuda.so.1`` that knows no device: here, and in the processes
    that this one starts, as these import kernels before SGLang loads plugins."""
    if numa.nvidia_gpus():
        return  # a missing driver is an error
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        native = find_spec("sglang_scout._native")  # is installed beside it
        stub = Path((native and native.origin) or "").parent / "no_driver" / "libcuda.so.1"
        ctypes.CDLL(str(stub))
        known = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = f"{stub.parent}:{known}" if known else str(stub.parent)
