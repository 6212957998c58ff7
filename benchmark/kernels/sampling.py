"""Samples in turns: how cpu_attention.py checks, times and writes what it compares."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmark.kernels import implementations as impls
from benchmark.kernels.implementations import Implementation, Inputs, Native, Shape
from benchmark.kernels.kv_pool import KvPool, PageStream
from benchmark.kernels.read_loop import AHEAD_BYTES, ReadLoop
from benchmark.rows import Row, Writer, summary

READ_SAMPLE_BYTES = 64 << 20  # shorter reads would measure the start of threads
SAMPLE_S = 2e-3
MAX_CALLS = 64
MAX_SAMPLES, MIN_SAMPLES = 20, 3
LONG_CALL_S = 0.2
SETTLE_S = 0.01  # after OpenMP code: its threads spin for some milliseconds


@dataclass
class Entry:
    """One implementation with one thread count, on the shape at hand."""

    impl: Implementation
    threads: int
    error: float
    calls: int
    samples: int
    samples_us: dict[int, float] = field(default_factory=dict)  # by round


Reads = dict[tuple[str, int], dict[int, float]]
"""Samples of the read loops in µs a call, by loop and threads, then by round."""


class Benchmark:
    """
    Args:
        entry_s: time for the samples of one implementation with one thread count.
        max_call_s: an implementation that would need longer for one call is skipped.
    """

    def __init__(
        self, threads: list[int], writer: Writer, cpus: list[int], entry_s: float, max_call_s: float
    ) -> None:
        self.threads, self.writer = threads, writer
        self.loop = ReadLoop(cpus)
        self._entry_s, self._max_call_s = entry_s, max_call_s
        self._best_isa = impls.isas()[0]
        self._rate: dict[tuple[object, ...], float] = {}  # best bytes per second seen so far
        self._span_at = 0

    def run_pool(
        self, pool: KvPool, implementations: list[Implementation], shapes: Sequence[Shape]
    ) -> None:
        """All shapes on one pool, small before large: rates of the first tell what later ones would take."""
        self._choose_ahead(pool)
        for shape in sorted(shapes, key=lambda s: s.call_bytes):
            say(
                f"{shape.models}: batch {shape.B}, {shape.R} pages, "
                f"{shape.call_bytes / 1e6:.0f} MB a call, {pool.backing} pages"
            )
            stream = PageStream(pool.num_pages(shape.page_bytes), shape.B * shape.R, seed=1)
            generator = torch.Generator().manual_seed(2)
            q = torch.randn(shape.B, shape.H * shape.G, shape.D, generator=generator)
            self._run_shape(Inputs(pool, shape, stream, q.bfloat16().float()), implementations)

    def _run_shape(self, inputs: Inputs, implementations: list[Implementation]) -> None:
        entries = self._checked(inputs, implementations)
        reads: Reads = {}
        rounds = max((e.samples for e in entries), default=MIN_SAMPLES)
        # In the rounds of the kernel: on a machine that gives now more and now less, medians of the same times.
        ours = (e.samples for e in entries if isinstance(e.impl, Native))
        read_samples = max(ours, default=MIN_SAMPLES)
        for r in range(rounds):
            if _due(r, rounds, read_samples):
                for threads in self.threads:
                    self._read(inputs, threads, reads, r)
            for e in [e for e in entries if _due(r, rounds, e.samples)]:
                try:
                    ns = e.impl.run(inputs, inputs.take(e.calls), e.threads)
                except Exception as error:  # a baseline that dies must not end the run
                    entries.remove(e)
                    self._add_without_samples(e.impl, *_outcome(error), e.threads, inputs)
                    continue
                e.samples_us[r] = ns / 1e3 / e.calls
                if not isinstance(e.impl, Native):
                    time.sleep(SETTLE_S)
        self._write(inputs, entries, reads)

    def _checked(self, inputs: Inputs, implementations: list[Implementation]) -> list[Entry]:
        """Entries that gave the right result; rows for the others."""
        expected: dict[str, torch.Tensor] = {}
        entries = []
        [at] = inputs.take(1)
        for impl in implementations:
            lower = isinstance(impl, Native) and impl.isa != self._best_isa
            for threads in self.threads[-1:] if lower else self.threads:
                try:
                    entries.append(self._check(inputs, impl, threads, at, expected))
                except Exception as error:
                    self._add_without_samples(impl, *_outcome(error), threads, inputs)
        return entries

    def _check(
        self, inputs: Inputs, impl: Implementation, threads: int, at: int,
        expected: dict[str, torch.Tensor],
    ) -> Entry:  # fmt: skip
        """
        Raises:
            TooSlow: one call takes too long.
            ValueError: a wrong result.
        """
        s = inputs.shape
        key = (impl.name, threads, s.H, s.G, s.D)
        self._limit(s.call_bytes / self._rate.get(key, float("inf")))
        call_s = impl.run(inputs, [at], threads) / 1e9
        if impl.layout not in expected:
            expected[impl.layout] = impl.expected(inputs, at)
        output = impl.output()[impls.checked_rows(s)]
        error, good = impls.error_of(output, expected[impl.layout], impl.tolerance)
        if not good:
            raise ValueError(f"wrong result: error {error:.2e}, tolerance {impl.tolerance:.0e}")
        if call_s < LONG_CALL_S:  # the first may have made threads or buffers
            call_s = impl.run(inputs, inputs.take(1), threads) / 1e9
        self._rate[key] = max(self._rate.get(key, 0.0), s.call_bytes / call_s)
        self._limit(call_s)
        calls = min(MAX_CALLS, max(1, round(SAMPLE_S / call_s)))
        samples = min(MAX_SAMPLES, max(MIN_SAMPLES, int(self._entry_s / (calls * call_s))))
        return Entry(impl, threads, error, calls, samples)

    def _limit(self, call_s: float) -> None:
        if call_s > self._max_call_s:
            raise impls.TooSlow(f"one call takes about {call_s:.1f} s")

    def _read(self, inputs: Inputs, threads: int, reads: Reads, r: int) -> None:
        """One sample of each read loop in round r."""
        call_bytes = inputs.shape.call_bytes
        calls = max(1, -(-READ_SAMPLE_BYTES // call_bytes))
        ns, _ = impls.read_pages_ns(self.loop, inputs, inputs.take(calls), threads)
        reads.setdefault(("read", threads), {})[r] = ns / 1e3 / calls
        # As many bytes in one piece, but no more than the pool has.
        nbytes = min(calls * call_bytes, inputs.pool.nbytes) // 512 * 512
        if self._span_at + nbytes > inputs.pool.nbytes:
            self._span_at = 0
        ns, _ = self.loop.span_ns(inputs.pool.k_address + self._span_at, nbytes, threads)
        self._span_at += nbytes
        reads.setdefault(("read-sequential", threads), {})[r] = ns * call_bytes / nbytes / 1e3

    def _write(self, inputs: Inputs, entries: list[Entry], reads: Reads) -> None:
        shape, sizes = inputs.shape, _sizes(inputs)
        found = {key: _in_rounds(samples) for key, samples in reads.items()}
        rates = {
            threads: max(
                shape.call_bytes / s["median_us"] / 1e3
                for (_, t), s in found.items()
                if t == threads
            )
            for threads in self.threads
        }

        def add(impl: str, threads: int, measured: Row, more: Row) -> Row:
            gb_per_s = shape.call_bytes / measured["median_us"] / 1e3
            return self.writer.add(
                impl, threads=threads, **sizes, gb_per_s=round(gb_per_s, 4),
                read_gb_per_s=round(rates[threads], 3),
                share_of_read=round(gb_per_s / rates[threads], 5),
                tokens_per_s=round(shape.B * shape.R * shape.S / measured["median_us"] * 1e6),
                **more, **measured,
            )  # fmt: skip

        for (name, threads), measured in found.items():
            ahead = self.loop.ahead_bytes[threads]
            add(name, threads, measured, {"prefetch_ahead_bytes": ahead})
        for e in entries:
            more: Row = {"max_abs_error": float(f"{e.error:.3g}"), "tolerance": e.impl.tolerance}
            more["calls_per_sample"] = e.calls
            row = add(e.impl.name, e.threads, _in_rounds(e.samples_us), more)
            say(
                f"    {e.impl.name:22s} {e.threads} threads {row['gb_per_s']:7.2f} GB/s "
                f"{row['share_of_read']:5.0%} of read, spread {row['spread']:.0%}"
            )

    def _add_without_samples(
        self, impl: Implementation, status: str, reason: str, threads: int, inputs: Inputs
    ) -> None:
        say(f"    {impl.name:22s} {threads} threads: {status}, {reason}")
        self.writer.add(impl.name, status, reason, threads=threads, **_sizes(inputs))

    def _choose_ahead(self, pool: KvPool) -> None:
        """The prefetch distance of the read loop that is fastest on scattered pages."""
        shape = Shape("", 1, 1, 8, 1, 128)
        stream = PageStream(pool.num_pages(shape.page_bytes), 1, seed=3)
        inputs = Inputs(pool, shape, stream, torch.empty(0))
        for threads in self.threads:
            best: dict[int, int] = {}
            for _ in range(3):
                for ahead in AHEAD_BYTES:
                    self.loop.ahead_bytes[threads] = ahead
                    starts = inputs.take(min(1024, stream.num_pages))
                    ns, _ = impls.read_pages_ns(self.loop, inputs, starts, threads)
                    best[ahead] = min(ns, best.get(ahead, ns))
            self.loop.ahead_bytes[threads] = min(best, key=lambda a: best[a])


def _sizes(inputs: Inputs) -> Row:
    s = inputs.shape
    return {
        "models": s.models, "batch": s.B, "pages": s.R, "page_size": s.S, "H": s.H, "G": s.G,
        "D": s.D, "backing": inputs.pool.backing, "pool_bytes": inputs.pool.nbytes,
    }  # fmt: skip


def _outcome(error: Exception) -> tuple[str, str]:
    """Status and reason of a row."""
    return "skipped" if isinstance(error, impls.TooSlow) else "failed", one_line(error)


def _in_rounds(samples_us: dict[int, float]) -> Row:
    """summary() and the rounds of the samples."""
    return {"rounds": list(samples_us), **summary(list(samples_us.values()))}


def _due(r: int, rounds: int, samples: int) -> bool:
    """Spreads up to so many samples, MIN_SAMPLES at the least, over the rounds. The rounds of fewer samples are some
    of those of more, so that everything has rounds in common."""
    stride = 1
    while -(-rounds // stride) > samples and -(-rounds // (2 * stride)) >= MIN_SAMPLES:
        stride *= 2
    return r % stride == 0


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
