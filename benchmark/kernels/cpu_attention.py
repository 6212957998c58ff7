"""Paged decode attention on the CPU against the machine's read bandwidth and against baselines, in one run.

    python -m benchmark.kernels.cpu_attention --json FILE     some minutes; the machine should be otherwise idle
    python -m benchmark.kernels.cpu_attention --quick         one small size: does it run at all

Rows (format: rows.py), per shape and thread count:
    native-<isa>                       this project's kernel, per instruction set (all but the best: all threads only)
    read                               a read loop over the same pages in the same order
    read-sequential                    the same loop over one contiguous range
    sdpa-gather, sdpa-gather-grouped   torch, after copying the pages together; see implementations.py
    ipex-2.8                           Intel Extension for PyTorch; scripts/setup_ipex.sh
    sgl-kernel-<version>, vllm-<commit>   SGLang's and vLLM's decode attention; scripts/setup_baseline_kernels.sh

All pages come from one pool much larger than the caches, in shuffled order; a page is read again only after all
others. Samples are taken in turns, so that a slow moment hits all alike, and begin with threads that are awake
(awake.py). An implementation is measured only after its output has been compared with the reference on the same inputs.

Fields beside those of rows.py; null in rows that are not "ok", where they do not apply:
    models, batch, pages, page_size, H, G, D, threads, backing ("thp" or "4k"), pool_bytes
    gb_per_s                  bytes of K and V that a call reads / median time; GB = 1e9
    read_gb_per_s             the larger medians of read and read-sequential, same shape and threads
    share_of_read             gb_per_s / read_gb_per_s
    tokens_per_s              B * R * S / median time: cached tokens attended, of one layer
    samples_us, median_us     per call; a sample is the mean of calls_per_sample calls
    rounds                    of the samples: what was sampled in the same round lies some milliseconds apart
    max_abs_error, tolerance  of the check
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from benchmark.kernels import compiled_baselines, ipex_client
from benchmark.kernels import implementations as impls
from benchmark.kernels.implementations import Implementation, Ipex, Native, SdpaGather, Shape
from benchmark.kernels.kv_pool import KvPool, available_bytes, make_tile
from benchmark.kernels.read_loop import ReadLoopError
from benchmark.kernels.sampling import Benchmark, one_line, say
from benchmark.rows import ROOT, Row, Writer, cache_bytes, environment

MODELS = (  # names, H, G, D
    ("Qwen3-8B, Llama-3.1-8B", 8, 4, 128),
    ("Qwen3-14B", 8, 5, 128),
    ("LLaMA-2-7B (MHA)", 32, 1, 128),
    ("Qwen3-32B, Llama-3.1-70B", 8, 8, 128),
)
SIZES = tuple((batch, pages) for pages in (8, 64, 512) for batch in (1, 16, 64))
SIZES_4K = ((16, 64),)
POOL_BYTES, QUICK_POOL_BYTES = 2 << 30, 1 << 26
ENTRY_S, QUICK_ENTRY_S, MAX_CALL_S = 0.5, 0.02, 2.0
MEMORY_CAP_BYTES = 8 << 30
NOT_MEASURED = (
    "threads", "batch", "pages", "H", "G", "D", "gb_per_s", "read_gb_per_s", "samples_us",
)  # fmt: skip


def fitting_pool_bytes(wanted: int, copies: int) -> int:
    """Pool size such that ``copies`` of it fit the cap and the memory at hand."""
    room = min(MEMORY_CAP_BYTES, available_bytes() * 0.8) - (1 << 30)  # for gathers and the rest
    return max(0, int(min(wanted, room / copies)) // (4 << 20) * (4 << 20))


def shapes_of(quick: bool, sizes: tuple[tuple[int, int], ...]) -> list[Shape]:
    models = MODELS[1:2] if quick else MODELS
    return [Shape(name, B, R, H, G, D) for name, H, G, D in models for B, R in sizes]


def baselines(
    stack: contextlib.ExitStack, writer: Writer, shapes: list[Shape], pool_bytes: int,
    without: set[str],
) -> list[Implementation]:  # fmt: skip
    """Those that there are; a row for each that there is not."""
    found: list[Implementation] = [
        SdpaGather(grouped, MAX_CALL_S)
        for grouped in (False, True)
        if SdpaGather.name_of(grouped) not in without
    ]
    for compiled in compiled_baselines.ALL:
        left_out = "left out by --without" if compiled.NAME in without else ""
        if why := left_out or compiled_baselines.absent_reason(compiled.NAME):
            writer.add(compiled.NAME, "absent", why)
        else:
            found.append(compiled())
    if "ipex-2.8" in without or not ipex_client.PYTHON.exists():
        why = "left out by --without" if "ipex-2.8" in without else ipex_client.ABSENT
        writer.add("ipex-2.8", "absent", why)
        return found
    try:
        log = ROOT / ".cache" / "benchmark" / "ipex.log"
        client = stack.enter_context(ipex_client.IpexClient(shapes, pool_bytes, log))
        found.append(Ipex(client))
    except ipex_client.BaselineError as error:
        writer.add("ipex-2.8", "failed", one_line(error))
    return found


def run(args: argparse.Namespace, threads: list[int], cpus: list[int], writer: Writer) -> None:
    without = set(filter(None, args.without.split(",")))
    wanted = QUICK_POOL_BYTES if args.quick else POOL_BYTES
    pool_bytes = fitting_pool_bytes(wanted, 1 + ("ipex-2.8" not in without))
    if pool_bytes < min(wanted, 8 * cache_bytes()):
        reason = f"the pool may have {pool_bytes >> 20} MiB, the cache has {cache_bytes() >> 20}"
        writer.add("native", "skipped", f"does not fit: {reason}")
        return
    entry_s = QUICK_ENTRY_S if args.quick else ENTRY_S
    bench = Benchmark(threads, writer, cpus, entry_s, MAX_CALL_S)
    shapes = shapes_of(args.quick, ((2, 4),) if args.quick else SIZES)
    tile = make_tile(seed=0)
    with contextlib.ExitStack() as stack:
        say(f"making a pool of {pool_bytes >> 20} MiB")
        pool = KvPool(pool_bytes, True, tile)
        ours: list[Implementation] = [Native(isa) for isa in impls.isas()]
        others = baselines(stack, writer, shapes, pool_bytes, without)
        bench.run_pool(pool, ours + others, shapes)
    del pool
    shapes = shapes_of(args.quick, ((2, 4),) if args.quick else SIZES_4K)
    bench.run_pool(KvPool(pool_bytes, False, tile), ours[:1], shapes)


def thread_counts(cpus: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({cpus, *(1 << i for i in range(cpus.bit_length()) if 1 << i <= cpus)})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Rows are described at the top of this file and of rows.py.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="one small size")
    parser.add_argument(
        "--threads", type=lambda s: sorted({int(x) for x in s.split(",")}), metavar="N,...",
        help="thread counts; default 1, 2, 4 ... all",
    )  # fmt: skip
    parser.add_argument("--without", default="", metavar="IMPL,...", help="leave these out")
    args = parser.parse_args(argv)
    cpus = sorted(os.sched_getaffinity(0))
    threads = args.threads or thread_counts(len(cpus))
    if not 1 <= threads[0] <= threads[-1] <= len(cpus):
        print(f"--threads {threads}: there are {len(cpus)} CPUs", file=sys.stderr)
        return 2
    shared: Row = environment("cpu_attention", ("sglang-scout", "torch", "numpy"))
    shared["native_best_isa"] = impls.isas()[0]
    writer = Writer(args.json, shared | dict.fromkeys(NOT_MEASURED))
    try:
        run(args, threads, cpus, writer)
    except ReadLoopError as error:
        writer.add("read", "absent", str(error))
        print(error, file=sys.stderr)
        return 1
    finally:
        writer.close()
    return 1 if any(row["status"] == "failed" for row in writer.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
