"""The C++ kernels for CPU tensors, from `sglang_scout._native`, and what they support.

The native module takes raw addresses and sizes, so Python validates everything that an address depends on:
sizes and dtypes in the op, device, layout and head size here. Page ids are checked against the pool before
anything is read: in C++ where the native function does so itself, by `check_ids` where it does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .op import Implementation, Op, Tensors

module: Any = None
ABSENT = ""
try:
    module = importlib.import_module("sglang_scout._native")
except ImportError as error:  # built without it, or for another Python: say why, run the reference
    ABSENT = f"the native module is absent ({error})"

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPES = DTYPES | {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
HEAD_DIMS = range(16, 16385, 16)


def _devices(tensors: Tensors) -> list[str]:
    if module is None:
        return [ABSENT]
    elsewhere = [(name, x.device) for name, x in tensors if x.device.type != "cpu"]
    return [f"{name} is on {device}; native reads CPU tensors" for name, device in elsewhere[:1]]


def implements(op: Op[..., Any], **limits: Any) -> Callable[[Callable[..., Any]], None]:
    """Register the decorated function; ``limits`` as in `Implementation`, in addition to those of all C++ kernels."""
    known = {"devices": _devices, "dtypes": tuple(DTYPES), "sizes": {"D": HEAD_DIMS}} | limits
    return lambda run: op.register(Implementation("native", run, **known))


def check_ids(op: str, name: str, ids: torch.Tensor, end: int) -> None:
    """Raise ValueError unless all of ``ids`` are in [0, end)."""
    if ids.numel() == 0:
        return
    smallest, largest = (int(x) for x in torch.aminmax(ids))
    if smallest < 0 or largest >= end:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"{op}: {name} has {wrong}, expected values in [0, {end})")
