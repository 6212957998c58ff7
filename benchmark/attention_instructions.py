"""What binds the CPU attention kernel: the instructions that it executes for a line of K or V, and how fast it and this
machine are while everything is in the cache.

    python benchmark/attention_instructions.py --json FILE     some two minutes
    python benchmark/attention_instructions.py --quick         one small shape

Rows (format: rows.py). impl is native-<isa>; a line is 64 bytes. Pages of 32 tokens, one thread:
    H, G, D
    instructions     per line, of all kinds; counted by stepping through a call of 1 and one of 2 pages
    multiply_adds    of these: fused multiply-adds and dot products
    other_vector     conversions, shuffles, additions and the like
    moves            vector loads, stores and broadcasts on their own
    hints            prefetches
    scalar           the rest
    samples_us       a call of 64 times the same page
    cached_gb_per_s  of these calls
    instructions_per_ns, multiply_adds_per_ns    in the cached calls
    peak_per_ns      of independent multiply-adds of 64 bytes on the same core, in turns with the calls: where the
                     field before comes near it, arithmetic binds, whatever the memory does
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import attention_impls as impls
import single_steps
from read_loop import ReadLoopError, compiled
from rows import Writer, environment, percentile, summary
from sglang_scout.ops import native

S, LINE_BYTES = 32, 64
SHAPES = ((8, 1, 128), (8, 4, 128), (8, 5, 128), (8, 8, 128), (2, 16, 128))
QUICK = ((1, 4, 128),)
ROUNDS, CACHED_PAGES = 15, 64

Call = Callable[[list[int]], object]


def call_of(H: int, G: int, D: int) -> tuple[Call, int]:
    """A call of the kernel with a list of pages of a pool of two, and the bytes of K and V of a page."""
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(1, H * G, D, generator=rng).bfloat16().float()
    k, v = (torch.randn(2, S, H, D, generator=rng).bfloat16() for _ in range(2))
    out = (torch.empty_like(q), torch.empty(1, H * G))

    def call(pages: list[int]) -> object:
        ids = torch.tensor([pages], dtype=torch.int32)
        return native.ATTEND_PAGES.run(q, k, v, ids, None, None, D**-0.5, 0.0, out)

    return call, 4 * S * H * D


def kind(mnemonic: str) -> str:
    if mnemonic.startswith(("vfm", "vfnm", "vdpbf16", "vpdp", "vpmadd")):
        return "multiply_adds"
    if mnemonic.startswith("prefetch"):
        return "hints"
    if mnemonic.startswith(("vmov", "vbroadcast", "vpbroadcast", "vlddqu")):
        return "moves"
    return "other_vector" if mnemonic.startswith("v") else "scalar"


def instructions_per_line(call: Call, page_bytes: int, names: dict[int, str]) -> dict[str, float]:
    library = Path(sys.modules["sglang_scout._native"].__file__ or "").resolve()
    few, many = (
        single_steps.count(lambda pages=pages: call(pages), library) for pages in ([0], [0, 1])
    )
    many.subtract(few)
    kinds = dict.fromkeys(("multiply_adds", "other_vector", "moves", "hints", "scalar"), 0.0)
    for at, times in many.items():
        kinds[kind(names.get(at, ""))] += times / (page_bytes / LINE_BYTES)
    return {name: round(value, 2) for name, value in kinds.items()}


def multiply_adds_per_ns(library: ctypes.CDLL) -> float:
    count = ctypes.c_int64(2_000_000)
    return float(count.value / library.scout_multiply_add(count))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument(
        "--quick", action="store_true", help="one small shape, best instruction set"
    )
    args = parser.parse_args(argv)
    writer = Writer(args.json, environment("attention_instructions", ("sglang-scout", "torch")))
    why = single_steps.absent_reason() or native.ABSENT
    try:
        if why:
            writer.add("native", "absent", why)
            print(why, file=sys.stderr)
            return 1
        run(QUICK if args.quick else SHAPES, impls.isas()[: 1 if args.quick else 2], writer)
    except (single_steps.SteppingError, ReadLoopError) as error:
        writer.add("native", "absent", str(error))
        print(error, file=sys.stderr)
        return 1
    finally:
        writer.close()
    return 0


def run(shapes: tuple[tuple[int, int, int], ...], isas: list[str], writer: Writer) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    library = ctypes.CDLL(str(compiled()))
    library.scout_multiply_add.restype = ctypes.c_int64
    names = single_steps.mnemonics(Path(sys.modules["sglang_scout._native"].__file__ or ""))
    for H, G, D in shapes:
        calls: dict[str, Call] = {}
        kinds: dict[str, dict[str, float]] = {}
        page_bytes: dict[str, int] = {}
        for isa in isas:
            native.module.set_isa(isa)
            name = f"native-{isa}"
            calls[name], page_bytes[name] = call_of(H, G, D)
            calls[name]([0, 1])
            kinds[name] = instructions_per_line(calls[name], page_bytes[name], names)
        samples_us: dict[str, list[float]] = {name: [] for name in calls}
        peaks = []
        for _ in range(ROUNDS):  # in turns: what a virtual machine gets varies
            for name, call in calls.items():
                native.module.set_isa(name.rpartition("-")[2])
                begin_ns = time.perf_counter_ns()
                call([0] * CACHED_PAGES)
                samples_us[name].append((time.perf_counter_ns() - begin_ns) / 1e3)
            peaks.append(multiply_adds_per_ns(library))
        for name in calls:
            timing = summary(samples_us[name])
            lines_per_ns = CACHED_PAGES * page_bytes[name] / LINE_BYTES / timing["median_us"] / 1e3
            row = writer.add(
                name,
                H=H,
                G=G,
                D=D,
                instructions=round(sum(kinds[name].values()), 2),
                **kinds[name],
                **timing,
                cached_gb_per_s=round(lines_per_ns * LINE_BYTES, 2),
                instructions_per_ns=round(lines_per_ns * sum(kinds[name].values()), 2),
                multiply_adds_per_ns=round(lines_per_ns * kinds[name]["multiply_adds"], 2),
                peak_per_ns=round(percentile(peaks, 50), 2),
            )
            print(
                f"{name:24} G={G:<2}  {row['instructions']:5.1f} instructions a line, "
                f"{row['multiply_adds']:5.2f} of them multiply-adds; cached {row['cached_gb_per_s']:5.1f} GB/s, "
                f"{row['multiply_adds_per_ns']:.2f} of {row['peak_per_ns']:.2f} multiply-adds a ns",
                file=sys.stderr,
            )


if __name__ == "__main__":
    sys.exit(main())
