"""Time of scoring pages on the CPU: by minimum and maximum, and by rotated digests of one and two bits.

    python -m benchmark.kernels.page_scores --json FILE       a minute; the machine should be otherwise idle
    python -m benchmark.kernels.page_scores --quick           a small size, as a smoke test

Qwen3-8B's heads (32 query, 8 KV heads of 128), all pages of 64k tokens for each of 16 requests, one layer. Samples
alternate; each variant is checked against the reference first. Rows (format: rows.py): minmax, calibrated, rotated-2
and read, which reads the planes of rotated-2, 8 KiB at a time in random order, with as many threads. Fields in addition
to those of rows.py:
    batch, pages, threads, digest_bytes (that a call reads), gb_per_s,
    share_of_read, times_minmax      of gb_per_s and median_us to those of read and minmax
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from timeit import timeit

import numpy as np
import torch

from benchmark.kernels.gpu_pools import signs
from benchmark.kernels.read_loop import ReadLoop
from benchmark.rows import Row, Writer, environment, summary
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import (
    STATS_BYTES,
    Coordinates,
    build_layer_rotated,
    planes_shape,
    score_rotated,
)
from sglang_scout.ops.score import score_pages

HEADS, GROUP, DIM = 8, 4, 128
BUILD_PAGES = 512  # at once
READ_BYTES = 4096  # at each of two locations


def digests(pages: int, bits: int) -> list[torch.Tensor]:
    """Of random keys with a mean: (kmin, kmax) without bits, else (planes, stats)."""
    built = [torch.empty(pages, HEADS, DIM, dtype=torch.bfloat16) for _ in "ab"]
    if bits:
        shapes = planes_shape(bits, DIM), (DIM + STATS_BYTES,)
        built = [torch.empty(pages, HEADS, *shape, dtype=torch.uint8) for shape in shapes]
    for at in torch.arange(pages).split(BUILD_PAGES):
        k = torch.randn(len(at), 32, HEADS, DIM) + torch.randn(len(at), 1, HEADS, DIM)
        layers = LayerPages.of([k.bfloat16()], [k.bfloat16()], "cpu")
        build = build_layer_rotated if bits else build_layer_digests
        of_layer = Coordinates(*(x[None] for x in signs(HEADS))) if bits == 1 else None
        more = {"coordinates": of_layer} if of_layer else {}
        build(layers, torch.arange(len(at)), *(x[at[0] : at[-1] + 1][None] for x in built), **more)
    return built


def run(writer: Writer, batch: int, columns: int, rounds: int) -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    q = torch.randn(batch, HEADS * GROUP, DIM)
    table = torch.randperm(batch * columns).int().view(batch, columns)
    n_full = torch.full((batch,), columns, dtype=torch.int32)
    loop = ReadLoop(range(threads))
    calls: dict[str, tuple[int, Callable[[], object]]] = {}  # bytes and call
    for bits, name in enumerate(("minmax", "calibrated", "rotated-2")):
        op, tensors = score_rotated if bits else score_pages, digests(batch * columns, bits)
        more = {"coordinates": signs(HEADS)} if bits == 1 else {}
        few = q[:1], *tensors, table[:1], n_full[:1], DIM**-0.5
        both = (op(*few, impl=impl, **more) for impl in ("native", "reference"))
        if wrong := op.tolerances["bfloat16"].mismatch(*both):
            writer.add(name, "failed", wrong)
            continue
        arguments = q, *tensors, table, n_full, DIM**-0.5
        calls[name] = sum(x.nbytes for x in tensors), partial(op, *arguments, impl="native", **more)
    memory = calls["rotated-2"][1].args[1]
    half = memory.nbytes // 2 // READ_BYTES * READ_BYTES
    read_bytes = 2 * half
    ids = np.random.permutation(half // READ_BYTES).astype(np.int32)
    span = memory.data_ptr(), memory.data_ptr() + half, READ_BYTES, ids, threads
    samples: dict[str, list[float]] = {name: [] for name in (*calls, "read")}
    for _ in range(rounds):
        for name, (_, call) in calls.items():
            samples[name].append(1e6 * timeit(call, number=1))
        samples["read"].append(loop.pages_ns(*span)[0] / 1e3)
    found = {name: summary(taken) for name, taken in samples.items()}
    read_gb_per_s = read_bytes / found["read"]["median_us"] / 1e3
    for name, measured in found.items():
        nbytes = calls[name][0] if name in calls else read_bytes
        rate = nbytes / measured["median_us"] / 1e3
        ratio = measured["median_us"] / found["minmax"]["median_us"]
        more: Row = {
            "digest_bytes": nbytes,
            "gb_per_s": rate,
            "share_of_read": rate / read_gb_per_s,
        }
        more |= {"batch": batch, "pages": columns, "threads": threads, "times_minmax": ratio}
        writer.add(name, **more, **measured)
        print(
            f"{name:10s} {measured['median_us']:9.0f} us, spread {measured['spread']:.0%}, {ratio:.2f} of minmax, "
            f"{rate:.2f} GB/s, {rate / read_gb_per_s:.0%} of read"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    parser.add_argument("--quick", action="store_true", help="only one small size")
    args = parser.parse_args()
    writer = Writer(args.json, environment("page_scores", ("sglang-scout", "torch")))
    run(writer, *((2, 64, 3) if args.quick else (16, 2048, 15)))
    writer.close()


if __name__ == "__main__":
    main()
