"""The time at which a stream comes to a place between two kernels."""

from __future__ import annotations

import importlib
import time

import torch

from . import triton


def write_stamp(stamps: torch.Tensor, index: int) -> None:
    """Write nanoseconds of the device's clock to ``stamps[index]``, int64, in the order of the current stream.

    A graph that captured it writes anew in every replay. On the CPU device the clock is ``time.monotonic_ns``.
    """
    if stamps.device.type == "cpu" and not triton.interpreted():
        stamps[index] = time.monotonic_ns()
    else:
        importlib.import_module(".triton.stamp", __package__).stamp(stamps, index)
