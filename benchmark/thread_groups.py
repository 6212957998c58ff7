"""What it is worth that worker threads share sequences, where whole ones would leave some of them idle.

    python benchmark/thread_groups.py --json FILE     about half a minute; all cores should be free
    python benchmark/thread_groups.py --quick         some seconds

One WorkerClient with its real process, a thread on every CPU. From the post to the answer, the poster asleep
meanwhile, as a device's step leaves the CPUs to the worker. Pages of 32 tokens, 8 KV heads of 128, four query
heads each, in shuffled order from 512 MiB. The ways take turns.

Rows (format: rows.py):
    one-thread      each sequence is one thread's
    shared          as many threads share a sequence as the rule says (worker_threads_per_group 0)
Fields beside those of rows.py:
    pages           of the sequences of the record, a list
    parts           runs that each sequence was split into
    threads         of the worker
    fallback_pages  pages that the poster computed itself; 0 in a valid run
    of_one_thread   of shared: median, over the rounds, of this way's time / the other's in the same round
    of_one_thread_range  10th and 90th percentile of these
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np

from rows import Row, Writer, environment, of_worker, percentile, summary
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient, WorkerConfig

NUM_PAGES = 4096
MAX_PAGES = 512
CASES = (
    [1], [2], [4], [8], [16], [64], [512],
    [64] * 2, [64] + [6] * 3, [8] * 3, [16] * 3, [64] * 3, [16] * 5, [64] * 5, [64] * 7,
)  # fmt: skip
WAYS = {"one-thread": 1, "shared": 0}
TIMEOUT_US = 10_000_000
WARM_UP = 5


class Bench:
    """An arena of random pages, and requests over them."""

    def __init__(self, arena: Arena, client: WorkerClient) -> None:
        self._producer = client._producer  # its post takes the number of runs
        self._split = client.split
        rng = np.random.default_rng(1)
        bits = rng.standard_normal(1 << 22, np.float32).view(np.uint32) >> 16
        for plane in (arena.k_pages(0), arena.v_pages(0)):
            flat = plane.reshape(-1)
            for at in range(0, len(flat), len(bits)):
                flat[at : at + len(bits)] = bits[: len(flat) - at].astype(np.uint16)
        spec = arena.spec
        self._order = rng.permutation(NUM_PAGES).astype(np.int32)
        self._at = 0
        self._q = rng.standard_normal((spec.max_batch, spec.num_q_heads, spec.head_dim), np.float32)
        self.out = np.empty_like(self._q)
        self.lse = np.empty(self._q.shape[:2], np.float32)
        self._step = 0
        self.fallback_pages = 0

    def touch(self) -> None:
        """Every page once, so that the worker has mapped them all."""
        for _ in range(0, NUM_PAGES, MAX_PAGES):
            self.once([MAX_PAGES], 1, self._take([MAX_PAGES]))

    def _take(self, counts: list[int]) -> np.ndarray:
        pages = np.full((len(counts), MAX_PAGES), -1, np.int32)
        for row, count in enumerate(counts):
            if self._at + count > NUM_PAGES:
                self._at = 0
            pages[row, :count] = self._order[self._at : self._at + count]
            self._at += count
        return pages

    def once(self, counts: list[int], parts: int, pages: np.ndarray) -> float:
        """Microseconds from the post to the answer."""
        self._step += 1
        n, step = len(counts), self._step
        n_pages = np.array(counts, np.int32)
        q, out, lse = self._q[:n], self.out[:n], self.lse[:n]
        begin_ns = time.perf_counter_ns()
        ticket = self._producer.post(
            0, step, n, q.ctypes.data, pages.ctypes.data, MAX_PAGES, n_pages.ctypes.data, parts,
            q.nbytes,
        )  # fmt: skip
        _, fallback = self._producer.wait(
            ticket, 0, step, TIMEOUT_US, 0, out.ctypes.data, lse.ctypes.data, out.nbytes
        )
        self.fallback_pages += fallback
        return (time.perf_counter_ns() - begin_ns) / 1e3

    def check(self, counts: list[int]) -> None:
        """Both ways give the same for the same pages; raises AssertionError."""
        pages, n = self._take(counts), len(counts)
        found = []
        for parts in WAYS.values():
            self.once(counts, parts, pages)
            found.append((self.out[:n].copy(), self.lse[:n].copy()))
        for one, shared in zip(*found, strict=True):
            np.testing.assert_allclose(shared, one, rtol=1e-5, atol=1e-5)

    def measure(self, counts: list[int], samples: int) -> list[Row]:
        """Fields of a row for each way."""
        self.check(counts)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        rule = self._split.runs(sum(n > 0 for n in counts), sum(counts), max(counts))
        self.fallback_pages = 0
        for i in range(samples + WARM_UP):
            for way, runs in WAYS.items():
                took_us = self.once(counts, runs, self._take(counts))
                if i >= WARM_UP:
                    times[way].append(took_us)
        ratios = [b / a for a, b in zip(times["one-thread"], times["shared"], strict=True)]
        found: list[Row] = [
            {
                "impl": way,
                "pages": counts,
                "parts": WAYS[way] or rule,
                "fallback_pages": self.fallback_pages,
                **summary(times[way]),
            }
            for way in WAYS
        ]
        found[1]["of_one_thread"] = round(percentile(ratios, 50), 3)
        found[1]["of_one_thread_range"] = [round(percentile(ratios, p), 3) for p in (10, 90)]
        return found


def run(samples: int, writer: Writer) -> None:
    spec = ArenaSpec(
        num_layers=1, num_pages=NUM_PAGES, page_size=32, num_kv_heads=8, num_q_heads=32,
        head_dim=128, kv_dtype="bfloat16", scale=128**-0.5, max_batch=max(map(len, CASES)),
        max_pages=MAX_PAGES,
    )  # fmt: skip
    cpus = sorted(os.sched_getaffinity(0))
    # What is measured are its threads, on a busy machine too: a worker that had to wait for a CPU stays.
    config = WorkerConfig(heartbeat_timeout_s=30, stall_timeout_s=30)
    arena = Arena.create(spec)
    try:
        with WorkerClient(arena, cpus, config=config) as client:
            bench = Bench(arena, client)
            bench.touch()
            for counts in CASES:
                for row in bench.measure(counts, samples):
                    impl = row.pop("impl")
                    writer.add(impl, *of_worker(row["fallback_pages"]), threads=len(cpus), **row)
                    ratio = f", {row['of_one_thread']:.2f} of it" if "of_one_thread" in row else ""
                    print(
                        f"{impl:10s} pages {counts!s:16s} parts {row['parts']}: median "
                        f"{row['median_us']:8.1f} us, spread {row['spread']:.0%}{ratio}",
                        file=sys.stderr,
                    )
    finally:
        arena.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], epilog="Rows: see the top of this file."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="fewer samples, some seconds")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    writer = Writer(args.json, environment("thread_groups", ("sglang-scout", "numpy")))
    try:
        if len(os.sched_getaffinity(0)) < 2:
            writer.add("shared", "skipped", "one CPU: there is nobody to share with")
        else:
            run(20 if args.quick else 400, writer)
    finally:
        writer.close()
    return 1 if any(row["status"] == "failed" for row in writer.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
