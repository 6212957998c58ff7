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

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmark.kernels.kv_pool import Inputs, KvPool, Shape
from benchmark.kernels.read_loop import ReadLoop, ReadLoopError
from benchmark.rows import Row, Writer, argument_parser, environment, summary
from sglang_scout import _native
from sglang_scout.core.flags import FP8_KV
from sglang_scout.ops.attend import attend_pages, attend_pages_reference

MODELS = (  # names, H, G, D
    ("Qwen3-8B, Llama-3.1-8B", 8, 4, 128),
    ("Qwen3-14B", 8, 5, 128),
    ("LLaMA-2-7B (MHA)", 32, 1, 128),
    ("Qwen3-32B, Llama-3.1-70B", 8, 8, 128),
)
SIZES = tuple((batch, pages) for pages in (8, 64, 512) for batch in (1, 16, 64))
POOL_BYTES, QUICK_POOL_BYTES = 2 << 30, 1 << 26
ROUNDS, QUICK_ROUNDS = 7, 3
SAMPLE_S = 5e-3
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
            ids = ((first + np.arange(len(ids))) % inputs.num_pages).astype(np.int32)
        k, v = inputs.pool.planes(s)
        ns, _ = self._loop.pages_ns(k.data_ptr(), v.data_ptr(), s.page_bytes, ids, threads)
        return ns

    def error(self, inputs: Inputs, at: int) -> float:
        return 0.0


Implementation = Native | Read


def checked(impl: Implementation, inputs: Inputs, threads: int) -> tuple[float, int]:
    """(largest absolute error, calls per sample). Raises ValueError for a wrong result."""
    [at] = inputs.take(1)
    impl.run(inputs, [at], threads)
    error = impl.error(inputs, at)
    call_s = impl.run(inputs, inputs.take(1), threads) / 1e9
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
    entries: list[tuple[Implementation, int, float, int, list[float]]] = []
    for impl, count in itertools.product(implementations, threads):
        try:
            entries.append((impl, count, *checked(impl, inputs, count), []))
        except ValueError as error:
            writer.add(impl.name, "failed", str(error), threads=count, **sizes)
            say(f"    {impl.name:18s} {count} threads: {error}")
    for _ in range(rounds):
        for impl, count, _, calls, samples_us in entries:
            impl.run(inputs, inputs.take(1), count)
            samples_us.append(impl.run(inputs, inputs.take(calls), count) / 1e3 / calls)
            time.sleep(SETTLE_S)
    for impl, count, error, calls, samples_us in entries:
        measured = summary(samples_us)
        call_bytes = s.call_bytes * impl.element_bytes // 2
        gb_per_s = round(call_bytes / measured["median_us"] / 1e3, 4)
        tokens_per_s = round(s.B * s.R * s.S / measured["median_us"] * 1e6)
        found = {"gb_per_s": gb_per_s, "tokens_per_s": tokens_per_s, "calls_per_sample": calls}
        found |= {"max_abs_error": float(f"{error:.3g}"), "tolerance": impl.tolerance}
        found |= {"threads": count, "rounds": list(range(rounds))}
        writer.add(impl.name, **sizes, **found, **measured)
        say(
            f"    {impl.name:18s} {count} threads {gb_per_s:7.2f} GB/s {tokens_per_s / 1e6:7.2f} Mtok/s, "
            f"spread {measured['spread']:.0%}"
        )


def run(quick: bool, cpus: list[int], writer: Writer) -> None:
    loop, threads = ReadLoop(cpus), thread_counts(len(cpus))
    implementations: list[Implementation] = [Native(), Read(loop, False), Read(loop, True)]
    models, all_sizes = (MODELS[1:2], ((2, 4),)) if quick else (MODELS, SIZES)
    pool = KvPool(QUICK_POOL_BYTES if quick else POOL_BYTES)
    implementations += [
        Native(kind, pool.rounded(getattr(torch, dtype))) for kind, dtype in FP8_KV.items()
    ]
    for (name, *heads), (B, R) in itertools.product(models, all_sizes):
        inputs = Inputs(pool, Shape(name, B, R, *heads))
        run_shape(writer, inputs, implementations, threads, QUICK_ROUNDS if quick else ROUNDS)


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
    shared: Row = environment("cpu_attention", ("sglang-scout", "torch", "numpy"))
    shared["native_best_isa"] = _native.isa()
    writer = Writer(args.json, shared)
    try:
        run(args.quick, sorted(os.sched_getaffinity(0)), writer)
    except ReadLoopError as error:
        writer.add("read", "absent", str(error))
        print(error, file=sys.stderr)
        return 1
    finally:
        writer.close()
    return int(any(row["status"] == "failed" for row in writer.rows))


if __name__ == "__main__":
    sys.exit(main())
