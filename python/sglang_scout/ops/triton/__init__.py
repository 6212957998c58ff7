"""Triton kernels: one file per family. Each op registers its own with `implements`.

Importing this package does not import triton; the first call of a kernel does. On CPU tensors the
kernels run in Triton's interpreter if TRITON_INTERPRET=1 was set before triton was imported:
for tests, and only when asked for by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch

from ..op import Implementation, Op, Tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = range(16, 257, 16)
PAGE_TOKENS = range(1, 129)
"""For kernels that hold a page of one head at a time."""


@functools.cache
def _absent() -> str:
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed"


def interpreted() -> bool:
    """Whether triton, if imported now, would run kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def device_reasons(tensors: Tensors, pinned: tuple[str, ...] = ()) -> list[str]:
    """Reasons why kernels cannot run on the devices of these tensors.

    Those named in ``pinned`` may be in pinned host memory, which a device can read and write.
    """
    if _absent():
        return [_absent()]
    devices = {
        str(x.device)
        for name, x in tensors
        if not (name in pinned and x.device.type == "cpu" and x.is_pinned())
    }
    if len(devices) > 1:
        return [f"tensors are on {' and '.join(sorted(devices))}; triton takes one device"]
    if devices == {"cpu"} and not interpreted():
        return ["tensors are on cpu and TRITON_INTERPRET is not set"]
    if not all(name.startswith(("cpu", "cuda")) for name in devices):
        return [f"tensors are on {devices.pop()}; triton supports cuda"]
    return []


def _unasked() -> str:
    return (
        "TRITON_INTERPRET is set: kernels are interpreted only when asked for by name"
        * interpreted()
    )


def implements(
    op: Op[..., Any], module: str, *, pinned: tuple[str, ...] = (), **limits: Any
) -> None:
    """Register the function of ``module`` with the op's name; ``limits`` as in `Implementation`."""

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __name__), op.name)(*arguments)

    devices = functools.partial(device_reasons, pinned=pinned)
    known = {"devices": devices, "dtypes": DTYPES, "unasked": _unasked} | limits
    op.register(Implementation("triton", run, **known))
