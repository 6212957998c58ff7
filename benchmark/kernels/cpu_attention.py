"""Paged decode attention on the CPU against the machine's read bandwidth and against rivals, in one run.

    python -m benchmark.kernels.cpu_attention --json FILE     some minutes; the machine should be otherwise idle
    python -m benchmark.kernels.cpu_attention --quick         under a minute, fewer shapes

Rows (format: rows.py), per shape and thread count:
    native-<isa>                       this project's kernel, per instruction set
    read                               a read loop over the same pages in the same order
    read-sequential                    the same loop over one contiguous range
    sdpa-gather, sdpa-gather-grouped   torch, after copying the pages together; see attention_impls.py
    ipex-2.8                           Intel Extension for PyTorch; scripts/setup_ipex.sh
    sgl-kernel-<version>, vllm-<commit>   SGLang's and vLLM's decode attention; scripts/setup_rival_kernels.sh

All pages come from one pool much larger than the caches, in shuffled order; a page is read again only after all
others. Samples are taken in turns, so that a slow moment hits all alike, and begin with threads that are awake
(awake.py). An implementation is measured only
after its output has been compared with the reference on the same inputs.

Fields beside those of rows.py; null in rows that are not "ok", where they do not apply:
    models, batch, pages, page_size, H, G, D, threads, backing ("thp" or "4k")
    gb_per_s                  bytes of K and V (and their scales) that a call reads / median time; GB = 1e9
    read_gb_per_s             the larger medians of read and read-sequential, same shape and threads
    share_of_read             gb_per_s / read_gb_per_s
    tokens_per_s              B * R * S / median time: cached tokens attended, of one layer
    samples_us, median_us     per call; a sample is the mean of calls_per_sample calls
    rounds                    of the samples: what was sampled in the same round lies some milliseconds apart
    max_abs_error, tolerance  of the check
    revision                  of sgl-kernel and vllm: the commit that it was compiled from
    pool_bytes
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path

from benchmark.kernels import compiled_baselines, ipex_client
from benchmark.kernels import implementations as impls
from benchmark.kernels.implementations import Implementation, Ipex, Native, SdpaGather
from benchmark.kernels.kv_pool import TILE_ELEMENTS, KvPool, available_bytes, make_tile
from benchmark.kernels.plans import FULL, QUICK, SMOKE, Plan
from benchmark.kernels.read_loop import ReadLoopError
from benchmark.kernels.sampling import Benchmark, one_line
from benchmark.rows import ROOT, Writer, cache_bytes, environment

MEMORY_CAP_BYTES = 8 << 30
NOT_MEASURED = (
    "threads",
    "batch",
    "pages",
    "H",
    "G",
    "D",
    "gb_per_s",
    "read_gb_per_s",
    "samples_us",
)


def _default_threads(cpus: int) -> list[int]:
    """1, 2, 4, ... and all."""
    counts = [1]
    while counts[-1] * 2 <= cpus:
        counts.append(counts[-1] * 2)
    return sorted({*counts, cpus})


def _fitting_pool_bytes(wanted: int, copies: float) -> int:
    """Pool size such that ``copies`` of it fit the cap and the memory at hand, 0 if too small."""
    room = min(MEMORY_CAP_BYTES, available_bytes() * 0.8) - (1 << 30)  # for gathers and the rest
    nbytes = int(min(wanted, room / copies)) // (4 << 20) * (4 << 20)
    return nbytes if nbytes >= 8 << 20 else 0


def run(plan: Plan, threads: list[int], writer: Writer, cpus: list[int], without: set[str]) -> None:
    ipex_wanted = "ipex-2.8" not in without and ipex_client.PYTHON.exists()
    pool_bytes = _fitting_pool_bytes(plan.pool_bytes, 1 + ipex_wanted)
    if pool_bytes < min(plan.pool_bytes, 8 * cache_bytes()):
        for models, H, G, D in plan.models:
            writer.add(
                "native",
                "skipped",
                f"does not fit: the pool may have {pool_bytes >> 20} MiB, too little beside a "
                f"cache of {cache_bytes() >> 20} MiB",
                models=models,
                H=H,
                G=G,
                D=D,
            )
        return
    bench = Benchmark(plan, threads, writer, cpus)
    with contextlib.ExitStack() as stack:
        client = None
        if ipex_wanted:
            most = max(b * r for b, r in plan.sizes)
            heads = max(H * G * D for _, H, G, D in plan.models)
            queries = max(b for b, _ in plan.sizes) * heads
            smallest_page = min(H * D for _, H, _, D in plan.models) * impls.PAGE_SIZE * 2
            exchange = ipex_client.Exchange(
                tile=("uint16", TILE_ELEMENTS),
                ids=("int32", 2 * (pool_bytes // 2 // smallest_page) + most),
                q=("float32", queries),
                out=("float32", queries),
            )
            stack.callback(exchange.close)
            log = ROOT / ".cache" / "benchmark" / "ipex.log"
            client = stack.enter_context(ipex_client.IpexClient(exchange, log))
        bench.say(f"making a pool of {pool_bytes >> 20} MiB")
        tile = make_tile(seed=0)
        pool = KvPool(pool_bytes, True, tile)
        implementations: list[Implementation] = [Native(isa) for isa in impls.isas()]
        implementations += [SdpaGather(grouped, plan.max_call_s) for grouped in (False, True)]
        for rival in compiled_baselines.ALL:
            left_out = "left out by --without" if rival.NAME in without else ""
            if why := left_out or compiled_baselines.absent_reason(rival.NAME):
                writer.add(rival.NAME, "absent", why)
            else:
                implementations.append(rival())
                bench.say(f"{implementations[-1].name} is ready")
        implementations = [x for x in implementations if x.name not in without]
        if client is None:
            why = "left out by --without" if "ipex-2.8" in without else ipex_client.ABSENT
            writer.add("ipex-2.8", "absent", why)
        else:
            try:
                exchange.array("tile")[:] = tile
                seen = client.connect(pool_bytes)
                backing = seen.pop("backing")
                bench.say(f"ipex-2.8 is ready ({seen}, {backing} pages)")
                implementations.append(Ipex(client, exchange))
            except ipex_client.RivalError as error:
                writer.add("ipex-2.8", "failed", one_line(error))
        budget_4k_s = plan.budget_s * 0.1 if plan.sizes_4k else 0.0
        deadline_s = time.monotonic() + plan.budget_s - budget_4k_s
        bench.run_pool(pool, implementations, plan.sizes, deadline_s)
    if plan.sizes_4k:
        del pool, implementations
        pool = KvPool(pool_bytes, False, tile)
        best = Native(impls.isas()[0])
        bench.run_pool(pool, [best], plan.sizes_4k, time.monotonic() + budget_4k_s)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Rows are described at the top of this file and of rows.py.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer shapes, under a minute")
    size.add_argument("--smoke", action="store_true", help="one tiny shape: does it run at all")
    parser.add_argument(
        "--threads", type=_counts, metavar="N,...", help="thread counts; default 1, 2, 4 ... all"
    )
    parser.add_argument("--budget-s", type=float, help="time to aim at")
    parser.add_argument("--pool-mb", type=int, help="size of the pool of pages, in MiB")
    parser.add_argument("--without", default="", metavar="IMPL,...", help="leave these out")
    return parser.parse_args(argv)


def _counts(text: str) -> list[int]:
    counts = sorted({int(x) for x in text.split(",")})
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of thread counts")
    return counts


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    plan = QUICK if args.quick else SMOKE if args.smoke else FULL
    if args.budget_s:
        plan = dataclasses.replace(plan, budget_s=args.budget_s)
    if args.pool_mb:
        plan = dataclasses.replace(plan, pool_bytes=args.pool_mb << 20)
    cpus = sorted(os.sched_getaffinity(0))
    threads = args.threads or _default_threads(len(cpus))
    if threads[-1] > len(cpus):
        print(f"--threads {threads[-1]}: there are {len(cpus)} CPUs", file=sys.stderr)
        return 2
    shared = environment("cpu_attention", ("sglang-scout", "torch", "numpy"))
    shared["native_best_isa"] = impls.isas()[0]
    writer = Writer(args.json, shared | dict.fromkeys(NOT_MEASURED))
    try:
        run(plan, threads, writer, cpus, set(filter(None, args.without.split(","))))
    except ReadLoopError as error:
        writer.add("read", "absent", str(error))
        print(error, file=sys.stderr)
        return 1
    finally:
        writer.close()
    return 1 if any(row["status"] == "failed" for row in writer.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
