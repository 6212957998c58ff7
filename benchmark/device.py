"""Whether and on which device a kernel benchmark can run; the shared command line of such benchmarks."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmark import rows
from sglang_scout.ops import triton

COPY_BYTES = 1 << 30


def device() -> str:
    """Where kernels run: "cpu" in Triton's interpreter, "cuda" otherwise."""
    return "cpu" if triton.interpreted() else "cuda"


def refusal(*, untimed: bool) -> str:
    """Why it cannot run here, "" if it can. In the interpreter only what is ``untimed`` can: checks, rehearsals."""
    if device() == "cuda" and not torch.cuda.is_available():
        return "no CUDA device: nothing can be measured here"
    if device() == "cpu" and not untimed:
        return "TRITON_INTERPRET is set: unset it to measure"
    return ""


def captured(call: Callable[[], object]) -> Any:
    """A captured graph of a call, after one warm-up run that compiles and loads its kernels."""
    if device() == "cpu":
        call()
        return SimpleNamespace(replay=call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # it may still be writing the arguments
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    gc.collect()  # freeing an earlier graph during capture would abort it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.call = call  # keeps alive what the graph reads
    return graph


def times_us(call: Callable[[], object], count: int) -> list[float]:
    """Times of back-to-back calls: between events, or in the interpreter by the host's clock."""
    if device() == "cpu":
        at = [time.perf_counter()]
        for _ in range(count):
            call()
            at.append(time.perf_counter())
        return [1e6 * (end - begin) for begin, end in zip(at, at[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    pairs = zip(events, events[1:], strict=False)
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def copy_bytes_per_us(resource: str = "device") -> float:
    """Bandwidth of a copy larger than the caches: on the "device", both reads and writes, or over the "bus" to it."""
    nbytes = COPY_BYTES if device() == "cuda" else 1 << 20
    to = torch.empty(nbytes, dtype=torch.uint8, device=device())
    source = (
        torch.empty(nbytes, dtype=torch.uint8).pin_memory() if resource == "bus" else to.clone()
    )
    times = sorted(times_us(lambda: to.copy_(source, non_blocking=True), 9))
    return (1 if resource == "bus" else 2) * nbytes / times[4]


def name() -> str:
    """Of the device, for rows."""
    return torch.cuda.get_device_name() if device() == "cuda" else "cpu, interpreted"


def pointless(context: int, ours: int, full: int, host_gb: float, holder: str) -> str:
    """Why co-attention gains nothing over ``holder``, which has ``full`` requests of ``context`` tokens on the device
    where the host has ``ours``; "" if it may."""
    if ours > full:
        return ""
    return (
        f"{host_gb:.0f} GiB of host pages hold {ours} requests of {context} tokens, and {holder} holds {full} by "
        "itself: co-attention has nothing to gain; raise --host-gb, or take a device with less memory"
    )


def free() -> None:
    """Frees device memory of objects in reference cycles, as engines are."""
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()


def run(
    description: str | None,
    check: Callable[[argparse.Namespace], str],
    measure: Callable[[argparse.Namespace], int],
    *,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:
    """``--check-only`` or ``--out FILE``. Returns the exit code: 2 where it cannot run here.

    Args:
        check: takes the options and returns what is wrong, "" if nothing.
        measure: takes the options, with ``out``, the file for rows, and returns an exit code.
    """
    parser = rows.argument_parser(description)
    add_options(parser)
    parser.add_argument("--out", type=Path, help="JSON lines file to append to")
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    untimed = arguments.check_only or getattr(arguments, "rehearse", False)
    if why := refusal(untimed=untimed):
        print(why, file=sys.stderr)
        return 2
    if arguments.check_only:
        wrong = check(arguments)
        print(wrong or "equal")
        return int(bool(wrong))
    if arguments.out is None:
        parser.error("--out FILE is missing")
    return measure(arguments)
