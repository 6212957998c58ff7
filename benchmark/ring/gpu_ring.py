"""The ring between a CUDA graph and attention threads: cost of post, wait and answer within a step.

    python -m benchmark.ring.gpu_ring --out FILE     on a machine with a CUDA device and the native module
    python -m benchmark.ring.gpu_ring --check-only   answers only, in the interpreter with TRITON_INTERPRET=1 too

A graph of one post and one merge per layer is replayed, one replay per step; spinning attention threads of this
process answer with C++ attention. Times are between two events around a replay, divided by the layers.

Rows (format: rows.py), op being
    idle        epoch 0: nothing is posted; the cost of the graph nodes themselves
    one_page    a page per row: the round trip over the bus, with next to no attention
    one_page_in_front   the same, with all layers posted before the first wait, like layer-ahead posting
with B, layers, threads, p99_us. The threads must have answered every record.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmark import device, rows
from sglang_scout.engine.device import lock_memory
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.ops.attend import attend_pages_reference

LAYERS, PAGES, S, H, HQ, D, K = 8, 64, 32, 8, 40, 128, 64
EPOCH, SPIN_US = 1, 600_000_000
WARM_UP, SAMPLES = 20, 500
OPS = ("idle", 0, False), ("one_page", EPOCH, False), ("one_page_in_front", EPOCH, True)
"""Of the rows, with epoch and whether all layers are posted first."""


class Server:
    """An arena, attention threads on it, and the device's ring."""

    def __init__(self, arena, device: str, cpus: list[int]) -> None:
        from sglang_scout import _native

        self.arena, self.device = arena, device
        rng = np.random.default_rng(1)
        for layer in range(LAYERS):
            for plane in (arena.k_pages(layer), arena.v_pages(layer)):
                plane[:] = rng.standard_normal(plane.shape, np.float32)
        self.threads = len(cpus)
        self._producer = _native.RingProducer(arena.address, arena.nbytes)  # to read the counters
        self.runtime = _native.RingRuntime(arena.address, arena.nbytes, EPOCH, cpus, SPIN_US, 1)
        self.epoch = EPOCH
        of_ring = {"timeout_us": 5_000_000, "device": device}
        self.ring = GraphTransport(arena, lambda: self.epoch, **of_ring)

    def records(self) -> int:
        return self._producer.totals()["records"]


@contextmanager
def server(device: str, batch: int, threads: int) -> Iterator[Server]:
    from sglang_scout.worker.arena import Arena, ArenaSpec

    spec = ArenaSpec(LAYERS, PAGES, S, H, HQ, D, "float32", D**-0.5, batch, K, q_dtype="bfloat16")
    arena = Arena.create(spec)
    unlock = None
    allowed = os.sched_getaffinity(0)
    cpus = sorted(allowed)[-threads:]
    if own := allowed.difference(cpus):
        os.sched_setaffinity(0, own)  # this thread must not take turns with a spinning worker
    try:
        if device == "cuda":
            unlock = lock_memory(arena.address, arena.nbytes)
        running = Server(arena, device, cpus)
        try:
            yield running
        finally:
            if device == "cuda":
                torch.cuda.synchronize()
            running.runtime.stop()
    finally:
        if unlock is not None:
            unlock()
        arena.close()
        os.sched_setaffinity(0, allowed)


class Step:
    """Post and merge of all layers, on buffers with fixed addresses."""

    def __init__(self, running: Server, batch: int, in_front: bool = False) -> None:
        self.running, self.in_front = running, in_front
        rng = torch.Generator().manual_seed(2)
        device = running.device
        self.q = torch.randn(batch, HQ, D, generator=rng).to(device, torch.bfloat16)
        pages = torch.full((batch, K), -1, dtype=torch.int32)
        pages[:, 0] = torch.randint(0, PAGES, (batch,), generator=rng, dtype=torch.int32)
        self.pages, self.counts = pages.to(device), torch.ones(batch, dtype=torch.int32).to(device)
        self.out = torch.zeros(batch, HQ, D, device=device)
        self.lse = torch.full((batch, HQ), -torch.inf, device=device)

    def __call__(self) -> None:
        ring = self.running.ring
        layers = range(LAYERS)
        for block in (layers,) if self.in_front else ((layer,) for layer in layers):
            for layer in block:
                ring.post(layer, self.q, self.pages, self.counts)
            for layer in block:
                ring.merge(layer, None, self.out, (self.out, self.lse))


def check(device: str) -> str:
    """The problem with an answer, "" if there is none."""
    with server(device, 2, 1) as running:
        step, ring = Step(running, 2), running.ring
        for number in (1, 2):
            ring.begin_step(number)
            ring.post(3, step.q, step.pages, step.counts)
            merged = ring.merge(3, None, step.out, (step.out, step.lse))
        errors = ring.errors()
        k, v = (torch.from_numpy(x(3)) for x in (running.arena.k_pages, running.arena.v_pages))
        want = attend_pages_reference(step.q.cpu(), k, v, step.pages.cpu(), None, None, D**-0.5)
    if errors:
        return "; ".join(errors)
    # An answer is rounded to bfloat16.
    is_right = torch.allclose(merged.cpu(), want[0], rtol=2**-8, atol=1e-5)
    return "" if is_right else "another answer"


def samples_us(step: Step, epoch: int) -> list[float]:
    """Microseconds per layer of each replay.

    Raises:
        RuntimeError: a replay failed, or not all records were answered. After an error merges no longer wait.
    """
    ring, records = step.running.ring, step.running.records
    ring.pause()
    graph = device.captured(step)
    step.running.epoch = epoch
    before, samples = records(), []
    for number in range(1, WARM_UP + SAMPLES + 1):
        ring.begin_step(number)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / LAYERS)
        if faults := ring.faults():
            raise RuntimeError(f"replay {number}: {'; '.join(faults)}")
    answered, expected = records() - before, len(samples) * LAYERS * (epoch > 0)
    if answered != expected:
        raise RuntimeError(f"{answered} records answered, expected {expected}")
    return samples[WARM_UP:]


def measure(options: argparse.Namespace) -> int:
    shared = rows.environment("gpu_ring", ("torch", "triton"), cuda=True)
    shared |= {"device": torch.cuda.get_device_name(), "layers": LAYERS}
    writer, sizes = rows.Writer(options.out, shared, append=True), {"op": "check"}
    threads = max(1, min(8, len(os.sched_getaffinity(0)) - 2))
    try:
        if wrong := check("cuda"):
            raise RuntimeError(wrong)
        for batch in (1, 16):
            with server("cuda", batch, threads) as running:
                for op, epoch, in_front in OPS:
                    sizes = {"op": op, "B": batch, "threads": threads}
                    samples = samples_us(Step(running, batch, in_front), epoch)
                    p99_us = round(rows.percentile(samples, 99), 3)
                    row = writer.add("triton", p99_us=p99_us, **sizes, **rows.summary(samples))
                    print(f"{sizes}: {row['median_us']:.2f} us, p99 {p99_us:.2f}", flush=True)
    except RuntimeError as error:
        writer.add("triton", "failed", str(error), **sizes)
        print(f"{sizes}: FAILED {error}")
        return 1
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    where = device.device()
    sys.exit(device.run(__doc__, lambda options: check(where), measure))
