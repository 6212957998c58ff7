"""Threads that poll when a timed call begins, as the worker's do within a step and those of the read loop.

A thread that went to sleep between two samples takes from some ten microseconds to milliseconds to wake, in a virtual
machine above all: that would be measured in place of the attention. No part of this project is needed here: the
environment of the baseline benchmark imports this module too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

AWAKE_S = 1e-3
_ELEMENTS = 1 << 18  # torch computes as many in parallel


def by_calls(small: Callable[[], object]) -> None:
    """``small`` over and over: its threads, woken by the first call, find the later ones."""
    end_s = time.perf_counter() + AWAKE_S
    while time.perf_counter() < end_s:
        small()


@contextmanager
def in_place(small: Callable[[], object]) -> Iterator[None]:
    """This thread stays on one core, as the worker's do, and the kernel's other threads, which avoid it, on theirs:
    otherwise two of them meet on a core now and then while another one is idle. ``small`` makes them poll."""
    small()  # its threads may run on all cores: they are made with what this one may run on
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        by_calls(small)
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def openmp() -> None:
    """The threads of torch, and of what computes in the same pool."""
    x = torch.zeros(_ELEMENTS)
    by_calls(lambda: x.add_(1))
