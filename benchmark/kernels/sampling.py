"""Samples in turns: how benchmark/kernels/cpu_attention.py checks, times and writes what it compares."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmark.kernels import implementations as impls
from benchmark.kernels.implementations import Implementation, Inputs, Native, Shape
from benchmark.kernels.kv_pool import KvPool, PageStream
from benchmark.kernels.plans import Plan
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
    call_s: float
    calls: int = 1
    samples: int = 0
    samples_us: dict[int, float] = field(default_factory=dict)  # by round

    @property
    def is_ours(self) -> bool:
        return isinstance(self.impl, Native)


class Failed(Exception):
    """An implementation gave a wrong result or none."""


class Benchmark:
    def __init__(self, plan: Plan, threads: list[int], writer: Writer, cpus: list[int]) -> None:
        self.plan, self.threads, self.writer = plan, threads, writer
        self.loop = ReadLoop(cpus)
        self.best_isa = impls.isas()[0]
        self.rate: dict[tuple[object, ...], float] = {}  # best bytes per second seen so far
        self._span_at = 0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def run_pool(
        self,
        pool: KvPool,
        implementations: list[Implementation],
        sizes: Sequence[tuple[int, int]],
        deadline_s: float,
    ) -> None:
        """All shapes on one pool; rates of the first ones tell what larger ones would take."""
        shapes = [
            Shape(models, B, R, H, G, D) for models, H, G, D in self.plan.models for B, R in sizes
        ]
        # What matters most first, should time run out; then small before large.
        shapes.sort(key=lambda s: ((s.B, s.R) not in self.plan.first, s.call_bytes))
        self._choose_ahead(pool)
        for i, shape in enumerate(shapes):
            left_s = deadline_s - time.monotonic()
            slice_s = max(0.5, left_s / (len(shapes) - i))
            self.say(
                f"[{i + 1}/{len(shapes)}] {shape.models}: batch {shape.B}, {shape.R} pages, "
                f"{shape.call_bytes / 1e6:.0f} MB a call, {pool.backing} pages"
            )
            stream = PageStream(pool.num_pages(shape.page_bytes), shape.B * shape.R, seed=1)
            generator = torch.Generator().manual_seed(2)
            q = torch.randn(shape.B, shape.H * shape.G, shape.D, generator=generator)
            inputs = Inputs(pool, shape, stream, q.bfloat16().float())
            if left_s < 0:
                for impl in implementations:
                    reason = f"the time of {self.plan.budget_s:.0f} s was up"
                    self._add_without_samples(impl, "skipped", reason, None, inputs)
                continue
            self.run_shape(inputs, implementations, slice_s)

    def run_shape(
        self, inputs: Inputs, implementations: list[Implementation], slice_s: float
    ) -> None:
        shape = inputs.shape
        entries = self._checked(inputs, implementations)
        read_calls = max(1, -(-READ_SAMPLE_BYTES // shape.call_bytes))
        reads: dict[tuple[str, int], dict[int, float]] = {}  # by loop and threads: by round

        # Half of the time for this shape is for samples of the entries, in equal parts.
        part_s = slice_s / 2 / max(1, len(entries))
        for e in entries:
            e.calls = min(MAX_CALLS, max(1, round(SAMPLE_S / e.call_s)))
            e.samples = int(part_s / (e.calls * e.call_s))
            e.samples = min(MAX_SAMPLES, max(MIN_SAMPLES, e.samples))
        rounds = max((e.samples for e in entries), default=MIN_SAMPLES)
        # In the rounds of the kernel: on a machine that gives now more and now less, medians of the same times.
        read_samples = max((e.samples for e in entries if e.is_ours), default=MIN_SAMPLES)
        begin_s = time.monotonic()
        for r in range(rounds):
            # The calls took longer than they promised: only what has too few samples goes on.
            late = time.monotonic() - begin_s > slice_s
            few_reads = max(map(len, reads.values()), default=0) < MIN_SAMPLES
            if few_reads if late else _due(r, rounds, read_samples):
                for threads in self.threads:
                    self._read(inputs, threads, read_calls, reads, r)
            for e in entries:
                due = _due(r, rounds, e.samples)
                if late:
                    due = e.samples > 0 and len(e.samples_us) < MIN_SAMPLES
                if not due:
                    continue
                try:
                    ns = e.impl.run(inputs, inputs.take(e.calls), e.threads)
                except Exception as error:  # a rival that dies must not end the run
                    e.samples_us.clear()
                    e.samples = 0
                    self._add_without_samples(e.impl, *_outcome(error), e.threads, inputs)
                    continue
                e.samples_us[r] = ns / 1e3 / e.calls
                if not e.is_ours:
                    time.sleep(SETTLE_S)
        self._write(inputs, entries, reads, read_calls)

    def _sizes(self, inputs: Inputs) -> Row:
        s = inputs.shape
        return {
            "models": s.models,
            "batch": s.B,
            "pages": s.R,
            "page_size": s.S,
            "H": s.H,
            "G": s.G,
            "D": s.D,
            "backing": inputs.pool.backing,
            "pool_bytes": inputs.pool.nbytes,
        }

    def _add_without_samples(
        self, impl: Implementation, status: str, reason: str, threads: int | None, inputs: Inputs
    ) -> None:
        self.say(f"    {impl.name:22s} {threads or 'all'} threads: {status}, {reason}")
        self.writer.add(impl.name, status, reason, threads=threads, **self._sizes(inputs))

    def _checked(self, inputs: Inputs, implementations: list[Implementation]) -> list[Entry]:
        """Entries that gave the right result, with the time of a call; rows for the others."""
        expected: dict[str, torch.Tensor] = {}
        entries = []
        [at] = inputs.take(1)
        for impl in implementations:
            for threads in self._threads_of(impl, inputs.shape):
                rate = self.rate.get(_rate_key(impl, threads, inputs.shape), float("inf"))
                call_s = inputs.shape.call_bytes / rate
                if call_s > self.plan.max_call_s:
                    reason = f"one call would take about {call_s:.1f} s"
                    self._add_without_samples(impl, "skipped", reason, threads, inputs)
                    continue
                try:
                    if impl.layout not in expected:
                        expected[impl.layout] = impl.expected(inputs, at)
                    entry = self._check(inputs, impl, threads, at, expected)
                    if entry.call_s > self.plan.max_call_s:
                        reason = f"one call took {entry.call_s:.1f} s"
                        self._add_without_samples(impl, "skipped", reason, threads, inputs)
                    else:
                        entries.append(entry)
                except Exception as error:
                    self._add_without_samples(impl, *_outcome(error), threads, inputs)
        return entries

    def _threads_of(self, impl: Implementation, shape: Shape) -> list[int]:
        lower = isinstance(impl, Native) and impl.isa != self.best_isa
        first = self.plan.all_isas and (shape.B, shape.R) in self.plan.first
        return self.threads[-1:] if lower and not first else self.threads

    def _check(
        self,
        inputs: Inputs,
        impl: Implementation,
        threads: int,
        at: int,
        expected: dict[str, torch.Tensor],
    ) -> Entry:
        call_s = impl.run(inputs, [at], threads) / 1e9
        output = impl.output()[impls.checked_rows(inputs.shape)]
        error, good = impls.error_of(output, expected[impl.layout], impl.tolerance)
        if not good:
            raise Failed(f"wrong result: error {error:.2e}, tolerance {impl.tolerance:.0e}")
        if call_s < LONG_CALL_S:  # the first may have made threads or buffers
            call_s = impl.run(inputs, inputs.take(1), threads) / 1e9
        key = _rate_key(impl, threads, inputs.shape)
        self.rate[key] = max(self.rate.get(key, 0.0), inputs.shape.call_bytes / call_s)
        return Entry(impl, threads, error, call_s)

    def _read(
        self,
        inputs: Inputs,
        threads: int,
        calls: int,
        reads: dict[tuple[str, int], dict[int, float]],
        r: int,
    ) -> None:
        """One sample of each read loop, in microseconds per call, in round r."""
        ns, _ = impls.read_pages_ns(self.loop, inputs, inputs.take(calls), threads)
        reads.setdefault(("read", threads), {})[r] = ns / 1e3 / calls
        # As many bytes in one piece, but no more than the pool has.
        nbytes = min(calls * inputs.shape.call_bytes, inputs.pool.nbytes) // 512 * 512
        if self._span_at + nbytes > inputs.pool.nbytes:
            self._span_at = 0
        ns, _ = self.loop.span_ns(inputs.pool.k_address + self._span_at, nbytes, threads)
        self._span_at += nbytes
        scaled_ns = ns * inputs.shape.call_bytes / nbytes
        reads.setdefault(("read-sequential", threads), {})[r] = scaled_ns / 1e3

    def _write(
        self,
        inputs: Inputs,
        entries: list[Entry],
        reads: dict[tuple[str, int], dict[int, float]],
        read_calls: int,
    ) -> None:
        shape, sizes = inputs.shape, self._sizes(inputs)
        rates: dict[int, float] = {}
        found = {key: _in_rounds(samples) for key, samples in reads.items()}
        for (_, threads), s in found.items():
            gb_per_s = shape.call_bytes / s["median_us"] / 1e3
            rates[threads] = max(rates.get(threads, 0.0), gb_per_s)

        def add(impl: str, threads: int, s: Row, calls: int, more: Row) -> Row:
            gb_per_s = shape.call_bytes / s["median_us"] / 1e3
            return self.writer.add(
                impl,
                threads=threads,
                **sizes,
                gb_per_s=round(gb_per_s, 4),
                read_gb_per_s=round(rates[threads], 3),
                share_of_read=round(gb_per_s / rates[threads], 5),
                tokens_per_s=round(shape.B * shape.R * shape.S / s["median_us"] * 1e6),
                calls_per_sample=calls,
                **more,
                **s,
            )

        for (name, threads), s in found.items():
            ahead: Row = {"prefetch_ahead_bytes": self.loop.ahead_bytes[threads]}
            add(name, threads, s, read_calls, ahead)
        for e in entries:
            if not e.samples_us:
                continue
            more: Row = {"max_abs_error": float(f"{e.error:.3g}"), "tolerance": e.impl.tolerance}
            row = add(e.impl.name, e.threads, _in_rounds(e.samples_us), e.calls, more)
            self.say(
                f"    {e.impl.name:22s} {e.threads} threads {row['gb_per_s']:7.2f} GB/s "
                f"{row['share_of_read']:5.0%} of read, {row['tokens_per_s'] / 1e6:7.2f} M tokens/s, "
                f"spread {row['spread']:.0%}"
            )

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


def _rate_key(impl: Implementation, threads: int, shape: Shape) -> tuple[object, ...]:
    return (impl.name, threads, shape.H, shape.G, shape.D)


def _outcome(error: Exception) -> tuple[str, str]:
    """Status and reason of a row."""
    return (
        ("skipped", str(error)) if isinstance(error, impls.TooSlow) else ("failed", one_line(error))
    )


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
