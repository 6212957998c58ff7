"""Paged decode attention on the CPU against the machine's read bandwidth, in one run.

    python -m benchmark.kernels.cpu_attention --json FILE     some minutes; the machine should be otherwise idle
    python -m benchmark.kernels.cpu_attention --quick         one small size, as a smoke test

Rows (format: rows.py), per shape and thread count:
    native-<isa>         this project's kernel, with the best instruction set
    fp8_<type>-<isa>     the same over as many fp8 pages
    read                 a read loop over the same pages in the same order
    read-sequential      the same loop over as many pages in address order

Up to commit 56dce02 also vLLM's kernel and IPEX.

All pages come from one pool much larger than the caches, in shuffled order; a page is read again only after all
others. In every round each implementation is sampled once, after a warm-up call that wakes its threads, so that
slowdowns of the machine affect all alike. The kernel is measured only after its output has been compared with the
reference on the same inputs.

Fields in addition to those of rows.py:
    models, batch, pages, page_size, H, G, D, threads, pool_bytes
    gb_per_s, tokens_per_s    bytes of K and V, and tokens, that a call reads / median time; GB = 1e9
    samples_us, median_us     per call; a sample is the mean of calls_per_sample calls
    rounds                    of the samples: those of one round were taken some milliseconds apart
    max_abs_error, tolerance  of the check
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmark.kernels.kv_pool import Inputs, KvPool, Shape
from benchmark.kernels.read_loop import ReadLoop, ReadLoopError
from benchmark.rows import Row, Writer, argument_parser, cache_bytes, environment, summary
from sglang_scout import _native
from sglang_scout.core.flags import FP8_KV
from sglang_scout.ops.attend import attend_pages, attend_pages_reference
from sglang_scout.worker.host_memory import available_bytes

MODELS = (  # names, H, G, D
    ("Qwen3-8B, Llama-3.1-8B", 8, 4, 128),
    ("Qwen3-14B", 8, 5, 128),
    ("LLaMA-2-7B (MHA)", 32, 1, 128),
    ("Qwen3-32B, Llama-3.1-70B", 8, 8, 128),
)
SIZES = tuple((batch, pages) for pages in (8, 64, 512) for batch in (1, 16, 64))
POOL_BYTES, QUICK_POOL_BYTES = 2 << 30, 1 << 26
RESERVE_BYTES = 1 << 30
ROUNDS, QUICK_ROUNDS = 7, 3
SAMPLE_S, MAX_CALL_S = 5e-3, 2.0
MAX_CALLS = 64
SETTLE_S = 0.01  # after OpenMP code: its threads spin for some milliseconds


class Native:
    """attend_pages in C++."""

    def __init__(self, kind: str = "native", elements: torch.Tensor | None = None) -> None:
        # fp32 sums in another order; on fp8 pages weights may be rounded to bf16.
        self.tolerance = 1e-5 if elements is None else 2**-9
        self.name, self._elements = f"{kind}-{_native.isa()}", elements
        self.element_bytes = 2 if elements is None else elements.itemsize

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        """Nanoseconds of one call per start."""
        torch.set_num_threads(threads)  # the kernel's own pool takes as many
        q, scale = inputs.q, inputs.shape.scale
        k, v = inputs.pool.planes(inputs.shape, self._elements)
        tables = [inputs.pages(at) for at in starts]
        begin_ns = time.perf_counter_ns()
        for pages in tables:
            self._out, _ = attend_pages(q, k, v, pages, None, None, scale)
        return time.perf_counter_ns() - begin_ns

    def error(self, inputs: Inputs, at: int) -> float:
        """The largest error of the first and the last sequence in the last call. Raises ValueError for a wrong one."""
        worst, (k, v) = 0.0, inputs.pool.planes(inputs.shape, self._elements)
        # One sequence at a time: the reference copies its pages in float32.
        for row in {0, inputs.shape.B - 1}:
            one = slice(row, row + 1)
            arguments = inputs.q[one], k, v, inputs.pages(at)[one], None, None, inputs.shape.scale
            expected, _ = attend_pages_reference(*arguments)
            error = (self._out[one] - expected).abs()
            worst = max(worst, float(error.max()))
            if not (error <= self.tolerance * (1 + expected.abs())).all():  # also catches NaN
                raise ValueError(f"wrong result: error {worst:.2e}")
        return worst


class Read:
    """The read loop."""

    tolerance = None  # no result to check
    element_bytes = 2

    def __init__(self, loop: ReadLoop, sequential: bool) -> None:
        self.name = "read-sequential" if sequential else "read"
        self._loop, self._sequential = loop, sequential

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        """All calls at once: shorter reads would measure thread start-up."""
        s = inputs.shape
        ids = np.concatenate([inputs.pages(at).flatten().numpy() for at in starts])
        if self._sequential:
            first = int(ids[0])
            ids = ((first + np.arange(len(ids))) % inputs.stream.num_pages).astype(np.int32)
        k, v = inputs.pool.planes(s)
        ns, _ = self._loop.pages_ns(k.data_ptr(), v.data_ptr(), s.page_bytes, ids, threads)
        return ns

    def error(self, inputs: Inputs, at: int) -> float:
        return 0.0


Implementation = Native | Read


def checked(impl: Implementation, inputs: Inputs, threads: int) -> tuple[float, int]:
    """(largest absolute error, calls per sample).

    Raises:
        ValueError: a wrong result.
        TimeoutError: one call takes too long.
    """
    [at] = inputs.take(1)
    impl.run(inputs, [at], threads)
    error = impl.error(inputs, at)
    call_s = impl.run(inputs, inputs.take(1), threads) / 1e9
    if call_s > MAX_CALL_S:
        raise TimeoutError(f"one call takes {call_s:.1f} s")
    return error, min(MAX_CALLS, max(1, round(SAMPLE_S / call_s)))


def run_shape(
    writer: Writer,
    inputs: Inputs,
    implementations: list[Implementation],
    threads: list[int],
    rounds: int,
) -> None:
    """Check all, then sample them round-robin; a row each."""
    s = inputs.shape
    sizes: Row = {"models": s.models, "batch": s.B, "pages": s.R, "page_size": s.S, "H": s.H}
    sizes |= {"G": s.G, "D": s.D, "pool_bytes": inputs.pool.nbytes}
    say(f"{s.models}: batch {s.B}, {s.R} pages, {s.call_bytes / 1e6:.0f} MB a call")
    entries = []
    for impl in implementations:
        for count in threads:
            try:
                entries.append((impl, count, *checked(impl, inputs, count)))
            except (ValueError, TimeoutError) as error:
                status = "skipped" if isinstance(error, TimeoutError) else "failed"
                writer.add(impl.name, status, str(error), threads=count, **sizes)
                say(f"    {impl.name:18s} {count} threads: {status}, {error}")
    samples_us: list[list[float]] = [[] for _ in entries]
    for _ in range(rounds):
        for (impl, count, _, calls), samples in zip(entries, samples_us, strict=True):
            impl.run(inputs, inputs.take(1), count)
            samples.append(impl.run(inputs, inputs.take(calls), count) / 1e3 / calls)
            time.sleep(SETTLE_S)
    for (impl, count, error, calls), samples in zip(entries, samples_us, strict=True):
        measured = summary(samples)
        call_bytes = s.call_bytes * impl.element_bytes // 2
        gb_per_s = round(call_bytes / measured["median_us"] / 1e3, 4)
        tokens_per_s = round(s.B * s.R * s.S / measured["median_us"] * 1e6)
        found = {"gb_per_s": gb_per_s, "tokens_per_s": tokens_per_s, "calls_per_sample": calls}
        found |= {"max_abs_error": float(f"{error:.3g}"), "tolerance": impl.tolerance}
        writer.add(
            impl.name, threads=count, rounds=list(range(rounds)), **sizes, **found, **measured
        )
        say(
            f"    {impl.name:18s} {count} threads {gb_per_s:7.2f} GB/s {tokens_per_s / 1e6:7.2f} Mtok/s, "
            f"spread {measured['spread']:.0%}"
        )


def run(args: argparse.Namespace, threads: list[int], cpus: list[int], writer: Writer) -> None:
    wanted = QUICK_POOL_BYTES if args.quick else POOL_BYTES
    # Two fp8 pools are as large as one.
    room = max(0, int(available_bytes() * 0.8) - RESERVE_BYTES) // 2
    pool_bytes = min(wanted, room // (4 << 20) * (4 << 20))
    if pool_bytes < min(wanted, 8 * cache_bytes()):
        reason = f"the pool may have {pool_bytes >> 20} MiB, the cache has {cache_bytes() >> 20}"
        writer.add("native", "skipped", f"does not fit: {reason}")
        return
    loop = ReadLoop(cpus)
    implementations: list[Implementation] = [Native(), Read(loop, False), Read(loop, True)]
    models, all_sizes = (MODELS[1:2], ((2, 4),)) if args.quick else (MODELS, SIZES)
    pool = KvPool(pool_bytes)
    implementations += [
        Native(kind, pool.rounded(getattr(torch, dtype))) for kind, dtype in FP8_KV.items()
    ]
    for name, H, G, D in models:
        for B, R in all_sizes:
            inputs = Inputs(pool, Shape(name, B, R, H, G, D))
            rounds = QUICK_ROUNDS if args.quick else ROUNDS
            run_shape(writer, inputs, implementations, threads, rounds)


def thread_counts(cpus: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({cpus, *(1 << i for i in range(cpus.bit_length()) if 1 << i <= cpus)})


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    parser.add_argument("--quick", action="store_true", help="only one small size")
    args = parser.parse_args(argv)
    cpus = sorted(os.sched_getaffinity(0))
    shared: Row = environment("cpu_attention", ("sglang-scout", "torch", "numpy"))
    shared["native_best_isa"] = _native.isa()
    writer = Writer(args.json, shared)
    try:
        run(args, thread_counts(len(cpus)), cpus, writer)
    except ReadLoopError as error:
        writer.add("read", "absent", str(error))
        print(error, file=sys.stderr)
        return 1
    finally:
        writer.close()
    return 1 if any(row["status"] == "failed" for row in writer.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
