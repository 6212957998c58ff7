"""Time of scoring pages on the CPU: by minimum and maximum, and by rotated digests of one and two bits.

    python -m benchmark.kernels.page_scores --json FILE       a minute; the machine should be otherwise idle
    python -m benchmark.kernels.page_scores --quick           a small size: does it run at all

Qwen3-8B's heads (32 query, 8 KV heads of 128), all pages of 64k tokens for each of 16 requests, one layer. Samples
are taken in turns; each is checked against the reference first. Rows (format: rows.py): minmax, rotated-1, rotated-2
and read, which reads as many bytes as each of them in one piece on as many threads. Fields beside those of rows.py:
    digest_bytes             that a call reads
    times_minmax             median_us over that of minmax; gb_per_s; read_gb_per_s of the row that reads as many bytes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.kernels.read_loop import AHEAD_BYTES, ReadLoop
from benchmark.rows import Row, Writer, environment, summary
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import build_layer_rotated, planes_shape, score_rotated
from sglang_scout.ops.score import score_pages

HEADS, GROUP, DIM, TOKENS = 8, 4, 128, 32
BUILD_PAGES = 512  # at once


def digests(pages: int, bits: int) -> list[torch.Tensor]:
    """Of random keys with a mean: (kmin, kmax) without bits, else (planes, stats)."""
    box = [torch.empty(pages, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    codes = [torch.empty(pages, HEADS, *planes_shape(max(bits, 1), DIM), dtype=torch.uint8)]
    codes += [torch.empty(pages, HEADS, DIM + 80, dtype=torch.uint8)]
    for begin in range(0, pages, BUILD_PAGES):
        at = slice(begin, min(begin + BUILD_PAGES, pages))
        count = at.stop - begin
        k = torch.randn(count, TOKENS, HEADS, DIM) + torch.randn(count, 1, HEADS, DIM)
        k = k.bfloat16()
        if bits:
            layers, ids = LayerPages.of([k], [k], "cpu"), torch.arange(count)
            build_layer_rotated(layers, ids, *(x[at][None] for x in codes))
        else:
            box[0][at], box[1][at] = k.aminmax(dim=1)
    return codes if bits else box


def timed_us(run: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e3


def run(writer: Writer, batch: int, columns: int, rounds: int) -> None:
    torch.manual_seed(0)
    threads, pages = torch.get_num_threads(), batch * columns
    q = torch.randn(batch, HEADS * GROUP, DIM)
    table = torch.randperm(pages).int().view(batch, columns)
    n_full = torch.full((batch,), columns, dtype=torch.int32)
    loop, out = ReadLoop(range(threads)), torch.empty(batch, columns)
    of = {
        "minmax": digests(pages, 0),
        "rotated-1": digests(pages, 1),
        "rotated-2": digests(pages, 2),
    }
    calls: dict[str, Callable[[], object]] = {}
    samples: dict[tuple[str, str], list[float]] = {}
    for name, tensors in of.items():
        op = score_pages if name == "minmax" else score_rotated
        arguments = (q, *tensors, table, n_full, DIM**-0.5, "mass")
        few = (q[:1], *tensors, table[:1], n_full[:1], DIM**-0.5, "mass")
        wrong = op.tolerances["bfloat16"].mismatch(
            op(*few, impl="native"), op(*few, impl="reference")
        )
        if wrong:
            writer.add(name, "failed", wrong)
            continue
        calls[name] = lambda op=op, arguments=arguments: op(*arguments, out, impl="native")
    for _ in range(rounds):
        for name, call in calls.items():
            samples.setdefault((name, name), []).append(timed_us(call))
            tensor, ns = of[name][0], 0
            nbytes = tensor.nbytes // 512 * 512
            for loop.ahead_bytes[threads] in AHEAD_BYTES:
                taken, _ = loop.span_ns(tensor.data_ptr(), nbytes, threads)
                ns = min(ns or taken, taken)
            digest_bytes = sum(x.nbytes for x in of[name])
            samples.setdefault(("read", name), []).append(ns / 1e3 * digest_bytes / nbytes)
    found = {key: summary(taken) for key, taken in samples.items()}
    for (impl, name), measured in found.items():
        nbytes = sum(x.nbytes for x in of[name])
        rates = {key: nbytes / found[key, name]["median_us"] / 1e3 for key in (name, "read")}
        more: Row = {
            "digest_bytes": nbytes,
            "gb_per_s": rates[impl],
            "read_gb_per_s": rates["read"],
        }
        base = found["minmax", "minmax"]["median_us"] if "minmax" in calls else None
        more["times_minmax"] = measured["median_us"] / base if base else None
        writer.add(impl, batch=batch, pages=columns, threads=threads, of=name, **more, **measured)
        print(
            f"{impl:10s} {name:10s} {measured['median_us']:9.0f} us  spread {measured['spread']:4.0%}  "
            f"{more['times_minmax'] or 0:5.2f} of minmax  {rates[impl]:5.2f} GB/s "
            f"({rates[impl] / rates['read']:4.0%} of read)", file=sys.stderr,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="one small size")
    args = parser.parse_args()
    writer = Writer(args.json, environment("page_scores", ("sglang-scout", "torch")))
    run(writer, *((2, 64, 3) if args.quick else (16, 2048, 15)))
    writer.close()


if __name__ == "__main__":
    main()
