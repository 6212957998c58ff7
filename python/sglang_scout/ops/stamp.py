"""Timestamps taken by a stream between two kernels."""

from __future__ import annotations

import importlib
import time

import torch

from . import triton


def write_stamp(stamps: torch.Tensor, index: int) -> None:
    """Write the device clock in nanoseconds to ``stamps[index]``, int64, in order on the current stream.

    A captured graph writes it again in every replay. On the CPU device the clock is ``time.monotonic_ns``.
    """
    if stamps.device.type == "cpu" and not triton.interpreted():
        stamps[index] = time.monotonic_ns()
    else:
        importlib.import_module(".triton.stamp", __package__).stamp(stamps, index)
