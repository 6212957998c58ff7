"""Round-trip latency from doorbell to done of a layer's request to the CPU attention process.

    python -m benchmark.ring.ring_latency --json FILE     about a minute; two cores should be free
    python -m benchmark.ring.ring_latency --quick         20 samples, as a smoke test

One WorkerClient with its real process. Its thread is pinned to one core, the poster to another. An item
has the minimum size: one page of 16 tokens, one head of 64 (10 KiB with q and pages, some 0.2 us of compute).

Rows (format: rows.py); samples_us are round trips:
    ring            RingProducer.post and wait, the calls underlying WorkerClient
    client          WorkerClient.post and wait, with its tickets
Fields in addition to those of rows.py:
    gap_us          busy-wait of the poster before each item; with 200 and more the thread is asleep, as it
                    spins for spin_us after its last work; 0: back to back
    p99_us, max_us
    fallback_pages  pages that the poster computed itself; 0 in a valid run
    worker_cpu, poster_cpu, spin_us
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmark import rows
from sglang_scout.ops.attend import attend_pages_reference
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient, WorkerConfig

SPEC = ArenaSpec(2, 64, 16, 1, 1, 64, "bfloat16", 0.125, max_batch=1, max_pages=1)
WARM_UP = 200
TIMEOUT_US = 1_000_000
CASES = {("ring", 0): 20_000, ("ring", 200): 10_000, ("ring", 1000): 10_000}
CASES |= {("client", 0): 10_000, ("client", 1000): 10_000}
"""Samples by way and gap in us."""
BLOCKS = 10  # cases alternate in blocks of a tenth of their samples


class Bench:
    """Buffers of a request, and the ways to send it."""

    def __init__(self, client: WorkerClient, spin_us: int) -> None:
        rng = np.random.default_rng(1)
        self._client, self._spin_us = client, spin_us
        # The client's underlying calls, without its checks: the cost of the ring itself.
        self._producer = client._producer
        self.q = rng.standard_normal((1, 1, SPEC.head_dim), np.float32)
        self._pages = np.zeros((1, 1), np.int32)
        self._counts = np.ones(1, np.int32)
        self.out = np.empty_like(self.q)
        self._lse = np.empty((1, 1), np.float32)
        self._step = 0
        self.fallback_pages = 0

    def block(self, way: str, gap_us: int, samples: int) -> list[float]:
        """Round trips in microseconds."""
        once, found = self._ring if way == "ring" else self._through_client, []
        for _ in range(samples):
            until_ns = time.perf_counter_ns() + gap_us * 1000
            while time.perf_counter_ns() < until_ns:
                pass  # a sleeping poster would also measure its own wake-up
            self._step += 1
            found.append(once() / 1e3)
        return found

    def _ring(self) -> int:
        post, wait, step = self._producer.post, self._producer.wait, self._step
        begin_ns = time.perf_counter_ns()
        ticket = post(0, step, self.q, self._pages, self._counts, 1)
        _, fallback = wait(ticket, 0, step, TIMEOUT_US, self._spin_us, self.out, self._lse)
        end_ns = time.perf_counter_ns()
        self.fallback_pages += fallback
        return end_ns - begin_ns

    def _through_client(self) -> int:
        begin_ns = time.perf_counter_ns()
        ticket = self._client.post(0, self._step, self.q, self._pages, self._counts)
        reply = self._client.wait(ticket, self.out, self._lse)
        end_ns = time.perf_counter_ns()
        self.fallback_pages += reply.fallback_pages
        return end_ns - begin_ns


def check_result(bench: Bench, arena: Arena) -> None:
    """Compares the answer with the op's reference; raises AssertionError."""
    bench.block("client", 0, 1)
    k, v = (torch.from_numpy(x(0)).view(torch.bfloat16) for x in (arena.k_pages, arena.v_pages))
    table = torch.zeros(1, 1, dtype=torch.int32)
    q = torch.from_numpy(bench.q)
    expected, _ = attend_pages_reference(q, k, v, table, None, None, SPEC.scale)
    torch.testing.assert_close(torch.from_numpy(bench.out), expected, rtol=1e-5, atol=1e-5)


def run(writer: rows.Writer, cpus: list[int], quick: bool, shared: rows.Row) -> None:
    """A row per case. Pins this process; the caller restores the affinity."""
    # Long timeouts, so that a worker starved on a busy machine is not replaced.
    config = WorkerConfig(heartbeat_timeout_s=30, stall_timeout_s=30)
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in CASES}
    fallback = dict.fromkeys(CASES, 0)
    arena = Arena.create(SPEC)
    try:
        rng = np.random.default_rng(0)
        for layer in range(SPEC.num_layers):
            for plane in (arena.k_pages(layer), arena.v_pages(layer)):
                values = rng.standard_normal(plane.shape, np.float32)
                plane[:] = (values.view(np.uint32) >> 16).astype(np.uint16)
        with WorkerClient(arena, [cpus[-1]], config=config) as client:
            os.sched_setaffinity(0, {cpus[0]})  # after the start: not inherited by the worker
            bench = Bench(client, config.spin_us)
            check_result(bench, arena)
            for number in range(BLOCKS):
                for case, count in CASES.items():
                    bench.block(*case, 20 if number else WARM_UP)
                    bench.fallback_pages = 0
                    samples[case] += bench.block(*case, 2 if quick else count // BLOCKS)
                    fallback[case] += bench.fallback_pages
            shared |= {"spin_us": config.spin_us, "restarts": client.snapshot().restarts}
    finally:
        arena.close()
    for (way, gap_us), us in samples.items():
        missed = fallback[way, gap_us]
        status = ("failed", f"no answer of the process for {missed} pages") if missed else ()
        found = {"gap_us": gap_us, **rows.summary(us), "fallback_pages": missed}
        found |= {"p99_us": round(rows.percentile(us, 99), 3), "max_us": round(max(us), 3)}
        writer.add(way, *status, **found, **shared)
        shown = ", ".join(f"{name} {found[name]}" for name in ("median_us", "p99_us", "max_us"))
        print(f"{way}, gap {gap_us} us: {shown}", file=sys.stderr)


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    parser.add_argument("--quick", action="store_true", help="only a few samples")
    args = parser.parse_args()
    allowed = os.sched_getaffinity(0)
    cpus, shared = sorted(allowed), rows.environment("ring_latency", ("sglang-scout", "numpy"))
    about = {"worker_cpu": cpus[-1], "poster_cpu": cpus[0]}
    writer = rows.Writer(args.json, shared)
    try:
        if len(cpus) < 2:
            writer.add("ring", "skipped", "one CPU: poster and attention process would share it")
        else:
            run(writer, cpus, args.quick, about)
    finally:
        os.sched_setaffinity(0, allowed)
        writer.close()
    return int(any(row["status"] == "failed" for row in writer.rows))


if __name__ == "__main__":
    sys.exit(main())
