"""Every kernel on a CUDA device: checked against its reference, then its time and share of the bandwidth.

    python -m benchmark.kernels.gpu_kernels --out FILE      check and time, a row per kernel and size of a served step
    python -m benchmark.kernels.gpu_kernels --check-only    every kernel at small sizes, nothing is timed (for
                                                    sanitizers; with TRITON_INTERPRET=1 in the interpreter too)
    ... --check-only --share I/N                    of these every N-th case from the I-th on, for N processes

Bytes are the kernel's minimum memory traffic, as stated in its file, or, if pages come from the host, the bus
traffic; scratch is not counted. A time is that of a CUDA graph of REPEATS calls on different pages, divided by
REPEATS, between two events, without launch overhead of Python. Before every sample a write larger than the L2 cache
flushes it. The device's bandwidth is that of a copy of 1 GiB in the same run, counting both read and write.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmark import device, rows
from benchmark.kernels import gpu_cases, policy_cases
from benchmark.kernels.gpu_pools import DTYPE, E4M3, E5M2, Case, D, G, Pools, S

WARM_UP, SAMPLES, ENOUGH_US, FEWEST = 2, 50, 300_000, 5
FLUSH_BYTES = 256 << 20
BUDGET_PAGES = 32  # the default
SERVED = (9, 2048), (32, 2048), (1, 2048), (40, 512)
"""Requests of a step and pages of each: as many of 64k tokens as 100 GiB of host memory hold and as 343 GB do, a single
one, and short ones."""


def check_cases(pools: Pools) -> Iterator[Case]:
    """Every kernel of every policy except the ring's, which benchmark/ring runs; feasible in the interpreter too, where
    a program takes a second."""
    yield from (gpu_cases.scores(pools, 2, 40, bits) for bits in gpu_cases.SCORES)
    yield from policy_cases.check_cases(pools)
    yield gpu_cases.selection(pools, 2, 40, 8)
    for kv in (DTYPE, E4M3, E5M2):
        yield gpu_cases.attention(pools, 2, 3, 9, kv)
        yield gpu_cases.appended(pools, 2, kv)
    on_cuda = pools.device == "cuda"
    for source in ("device", "host") if on_cuda else ("device",):
        yield from (gpu_cases.digests(pools, 3, source, kind) for kind in gpu_cases.BUILDS)
        yield gpu_cases.copies(pools, 3, source)
    yield from (gpu_cases.digests(pools, 3, "device", kind, E4M3) for kind in gpu_cases.BUILDS)
    for heads in (pools.H, 1):
        yield gpu_cases.staged(pools, 2 * pools.H // heads, 2, heads)
    yield gpu_cases.merged(pools, 2)
    yield gpu_cases.mass_changes(pools, 2, 3, 2)
    yield from gpu_cases.predicted(pools, 2)
    yield gpu_cases.stamped(pools)


def step_cases(pools: Pools, served: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """What a decode step of the default policy launches, at some numbers of requests and of pages of each, and
    attention over every page, as stock does, where the pools have as many."""
    for B, N in served:
        yield gpu_cases.scores(pools, B, N, 2)
        yield gpu_cases.selection(pools, B, N, BUDGET_PAGES)
        for kv in (DTYPE, E4M3):
            yield gpu_cases.attention(pools, B, BUDGET_PAGES, BUDGET_PAGES, kv)
    B, N = max(served, key=lambda x: x[0] * x[1])
    yield gpu_cases.scores(pools, B, N, 0)
    for requests in (1, 4):
        if requests * N <= pools.pages:
            yield gpu_cases.attention(pools, requests, N, N)
    yield from (gpu_cases.appended(pools, B, kv) for kv in (DTYPE, E4M3))
    yield gpu_cases.merged(pools, B)
    yield gpu_cases.mass_changes(pools, B, BUDGET_PAGES // 8, 2)
    yield from gpu_cases.predicted(pools, B)
    n = len(pools.layers("host").k[0])
    for pages in (16, n // 2):
        yield gpu_cases.copies(pools, pages, "host")
    yield gpu_cases.digests(pools, n, "host", "2 bits")


class Timer:
    """Samples of a list of calls, captured as one graph."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def samples_us(self, calls: list[Callable[[], object]]) -> list[float]:
        """Microseconds of one call, SAMPLES times, or fewer if they take long."""

        def all_calls() -> None:
            for call in calls:
                call()

        replay = device.captured(all_calls).replay
        samples = []
        for number in range(WARM_UP + SAMPLES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.fill_(number % 256)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if number >= WARM_UP:
                samples.append(begin.elapsed_time(end) * 1e3 / len(calls))
            if len(samples) >= FEWEST and sum(samples) * len(calls) > ENOUGH_US:
                break
        return samples


def add_row(writer: rows.Writer, timer: Timer, speed: dict[str, float], case: Case) -> bool:
    """Check and time a case; whether it is right."""
    fields = {"op": case.op, "bytes_moved": case.bytes_moved, **case.sizes}
    name = " ".join([case.op, *(f"{key}={x}" for key, x in case.sizes.items())])
    try:
        if wrong := case.check():
            raise RuntimeError(wrong)
        found = rows.summary(timer.samples_us(case.calls))
    except Exception as error:
        writer.add("triton", "failed", f"{type(error).__name__}: {error}", **fields)
        print(f"{name}: FAILED {error}", flush=True)
        return False
    reached = case.bytes_moved / found["median_us"]
    share = reached / speed[case.resource]
    fields |= {"resource": case.resource, "bandwidth_share": round(share, 4)}
    writer.add("triton", gb_per_s=round(reached / 1e3, 1), **fields, **found)
    print(f"{name}: {found['median_us']:.2f} us, {share:.0%} of {case.resource}", flush=True)
    return True


def measure(options: argparse.Namespace) -> int:
    pools = Pools("cuda", pages=8192, layers=4, heads=8)
    shared = rows.environment("gpu_kernels", ("torch", "triton"), cuda=True)
    shared |= {"device": torch.cuda.get_device_name(), "H": pools.H, "G": G, "D": D, "S": S}
    writer, timer = rows.Writer(options.out, shared, append=True), Timer()
    gc.freeze()  # each capture collects garbage, among all objects of torch and Triton it takes a quarter of a second
    speed = {resource: device.copy_bytes_per_us(resource) for resource in ("device", "bus")}
    print(", ".join(f"{name}: {x / 1e3:.1f} GB/s" for name, x in speed.items()), flush=True)
    are_right = [add_row(writer, timer, speed, case) for case in step_cases(pools, SERVED)]
    writer.close()
    return int(not all(are_right))


def check(options: argparse.Namespace) -> str:
    """Results only, at small sizes; on a device also in grids of many programs, at the sizes that `measure` compiles.

    Every process makes the inputs of all cases, so that they do not depend on its share.
    """
    where, share = device.device(), options.share
    on_cuda, failed = where == "cuda", 0
    every = check_cases(Pools(where, pages=64, layers=2, heads=8 if on_cuda else 2))
    if on_cuda:
        torch.cuda.set_stream(torch.cuda.Stream())
        wide = Pools(where, pages=9 * 2048 // 8, layers=4, heads=8)
        every = itertools.chain(every, step_cases(wide, ((1, 2048), (9, 2048))))
    for case in itertools.islice(every, share[0], None, share[1]):
        wrong = case.check()
        failed += bool(wrong)
        print(f"{case.op:19} {case.sizes}: {wrong or 'equal'}", flush=True)
    if on_cuda:
        torch.cuda.synchronize()
    return f"{failed} cases differ" if failed else ""


def add_share(parser: argparse.ArgumentParser) -> None:
    def share(text: str) -> list[int]:
        return [int(x) for x in text.split("/")]

    parser.add_argument("--share", type=share, default=(0, 1), metavar="I/N")


if __name__ == "__main__":
    sys.exit(device.run(__doc__, check, measure, add_options=add_share))
