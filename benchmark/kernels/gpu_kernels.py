"""Every kernel on a CUDA device: checked against its reference, then its time and share of the bandwidth.

    python -m benchmark.kernels.gpu_kernels --out FILE      check and time, a row per kernel and size
    python -m benchmark.kernels.gpu_kernels --check-only    small sizes, nothing is timed (for sanitizers; in
                                                    the interpreter with TRITON_INTERPRET=1 too)

Bytes are the kernel's minimum memory traffic, as stated in its file, or, if pages come from the host, the bus
traffic; scratch is not counted. A time is that of a CUDA graph of REPEATS calls on different pages, divided by
REPEATS, between two events, without launch overhead of Python; for copies by copy engines, which cannot be captured,
that of the calls, with host_us of one call on the host. Before every sample a write larger than the L2 cache flushes
it. The device's bandwidth is that of a copy of 512 MiB, measured in the same way in the same run, counting both read
and write.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from benchmark import device, rows
from benchmark.kernels.gpu_cases import Case, D, G, Pools, S, cases

WARM_UP, SAMPLES = 5, 50
FLUSH_BYTES, COPY_BYTES = 256 << 20, 512 << 20


class Timer:
    """Samples of a list of calls, captured as one graph."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def samples_us(self, calls: list[Callable[[], object]], eager: bool = False) -> list[float]:
        """Microseconds of one call, SAMPLES times."""
        replay = (lambda: [call() for call in calls]) if eager else device.captured(
            lambda: [call() for call in calls]
        ).replay  # fmt: skip
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
        return samples


def host_us(calls: list[Callable[[], object]]) -> float:
    """Host time of a call, in the calling thread."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    return round((time.perf_counter() - begin) * 1e6 / len(calls), 1)


def bandwidths(writer: rows.Writer, timer: Timer) -> dict[str, float]:
    """Bytes per microsecond of a copy on the "device" and over the "bus"; a row for each."""
    big = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(COPY_BYTES // 4, dtype=torch.uint8).pin_memory()
    speed = {}
    for resource, src, dst, times in (
        ("device", big, torch.empty_like(big), 2),
        ("bus", pinned, big[: len(pinned)], 1),
    ):
        samples = timer.samples_us([lambda to=dst, of=src: to.copy_(of, non_blocking=True)])
        found = rows.summary(samples)
        speed[resource] = times * src.nbytes / found["median_us"]
        gb_per_s = round(speed[resource] / 1e3, 1)
        writer.add("copy", op=f"{resource} bandwidth", gb_per_s=gb_per_s, **found)
        print(f"{resource}: {gb_per_s} GB/s", flush=True)
    return speed


def add_row(writer: rows.Writer, timer: Timer, speed: dict[str, float], case: Case) -> bool:
    """Check and time a case; on failure returns False, with a row that says why."""
    fields = {"op": case.op, "bytes_moved": case.bytes_moved, **case.sizes}
    if case.absent:
        writer.add(case.impl, "absent", case.absent, **fields)
        return True
    try:
        if wrong := case.check():
            raise RuntimeError(wrong)
        found = rows.summary(timer.samples_us(case.calls, case.eager))
        if case.eager:
            found["host_us"] = host_us(case.calls)
    except Exception as error:
        writer.add(case.impl, "failed", f"{type(error).__name__}: {error}", **fields)
        print(f"{case.op:19} {case.sizes}: FAILED {error}", flush=True)
        return False
    reached = case.bytes_moved / found["median_us"]
    share = reached / speed[case.resource]
    fields |= {"resource": case.resource, "bandwidth_share": round(share, 4)}
    writer.add(case.impl, gb_per_s=round(reached / 1e3, 1), **fields, **found)
    print(f"{case.op:19} {case.impl} {found['median_us']:9.2f} us {share:6.1%} of the {case.resource} {case.sizes}",
          flush=True)  # fmt: skip
    return True


def measure(options: argparse.Namespace) -> int:
    torch.cuda.set_stream(torch.cuda.Stream())  # batched memcpy rejects the default one
    pools = Pools("cuda", pages=16384, layers=8, heads=8)
    shared = rows.environment("gpu_kernels", ("torch", "triton"), cuda=True)
    shared |= {"device": torch.cuda.get_device_name(), "H": pools.H, "G": G, "D": D, "S": S}
    writer, timer = rows.Writer(options.out, shared, append=True), Timer()
    speed = bandwidths(writer, timer)
    done = [add_row(writer, timer, speed, case) for case in cases(pools, small=False)]
    writer.close()
    return 0 if all(done) else 1


def check(device: str) -> int:
    """Small sizes, results only."""
    failed = 0
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    for case in cases(
        Pools(device, pages=64, layers=2, heads=2 if device == "cpu" else 8), small=True
    ):
        wrong = "" if case.absent else case.check()
        failed += bool(wrong)
        said = f"absent, {case.absent}" if case.absent else wrong or "equal"
        print(f"{case.op:19} {case.impl} {case.sizes}: {said}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(device.run(__doc__, check, measure))
