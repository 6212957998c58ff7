"""FlashInfer beside our kernels on a CUDA device, for the part of an op that it covers.

    python benchmark/gpu_rivals.py --out FILE

Rows as those of gpu_kernels.py, and taken in the same way: "triton" and "flashinfer" at the same sizes in
one run. What FlashInfer lacks for our ops (docs/gpu.md says what) is done for it before the clock starts:
pages without a gap, their counts known to the host, its plan made, queries in bfloat16. FlashInfer
compiles its kernels when they are first used, which takes minutes. Where it is absent, does not compile
or differs from the reference, a row says so; the exit status tells of our own kernels only.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import device_here
import gpu_kernels
from gpu_kernels import DTYPE, HQ, REPEATS, Case, D, H, Pools, S
from sglang_scout.core.registry import Tolerance
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.select import select_pages

WORKSPACE_BYTES = 128 << 20
PAGES = 16384

_ROUNDED = "probabilities and result rounded to bfloat16"
OUT_TOLERANCE = Tolerance(1e-3, 2**-6, _ROUNDED)
LSE_TOLERANCE = Tolerance(1e-3, 1e-3, "fp32 sums of bfloat16 products")


def absence() -> str:
    """Why FlashInfer cannot be measured here, "" if it can."""
    return "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"


def attention(pools: Pools, B: int, resident: int) -> Case:
    """Paged decode over ``resident`` pages and a tail of half a page in each row."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    q, tail = pools.random(B, HQ, D).to(DTYPE), pools.ids(B)
    tables = [pools.ids(B, resident) for _ in range(REPEATS)]
    out, lse = torch.empty_like(q), torch.empty(B, HQ, device=q.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    first = torch.arange(B + 1, dtype=torch.int32) * (resident + 1)
    length = torch.full((B,), S // 2, dtype=torch.int32)
    planned = []
    for table in tables:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            first, torch.cat((table, tail[:, None]), 1).flatten(), length, HQ, H, D, S,
            q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=D**-0.5,
        )  # fmt: skip
        planned.append(wrapper)

    def call(wrapper: BatchDecodeWithPagedKVCacheWrapper) -> object:
        return wrapper.run(q, (pools.k, pools.v), out=out, lse=lse, return_lse=True)

    def check() -> str:
        call(planned[0])
        half = torch.full_like(tail, S // 2)
        want = attend_pages.reference(q.float(), pools.k, pools.v, tables[0], tail, half, D**-0.5)
        natural = lse * math.log(2)  # theirs is to base 2
        return OUT_TOLERANCE.mismatch(out.float(), want[0]) or LSE_TOLERANCE.mismatch(
            natural, want[1]
        )

    token_bytes = 2 * H * D * DTYPE.itemsize
    return Case(
        "attend_pages",
        {
            "B": B,
            "resident": resident,
            "covers": "compact tables, planned counts, bfloat16 q and out",
        },
        B * ((resident * S + S // 2) * token_bytes + 4 * (resident + 1))
        + 2 * q.nbytes
        + 4 * B * HQ,
        [lambda w=w: call(w) for w in planned],
        check,
    )


def selection(pools: Pools, B: int, N: int, k: int) -> Case:
    """Top-k and page look-up."""
    from flashinfer import top_k_page_table_transform

    table, lengths = pools.ids(B, N, pages=len(pools.kmin)), pools.full(N, B)
    given = [torch.rand(B, N, device=pools.device) for _ in range(REPEATS)]

    def call(scores: torch.Tensor) -> torch.Tensor:
        return top_k_page_table_transform(scores, table, lengths, k, deterministic=True)

    def check() -> str:
        slots = pools.full(0, len(pools.kmin))
        want = select_pages.reference(given[0], table, lengths, slots, k, 0, 0).pages
        same = torch.equal(call(given[0]).sort(1).values, want.sort(1).values)
        return "" if same else "other pages than the reference"

    return Case(
        "select_pages",
        {"B": B, "N": N, "k": k, "covers": "no forced pages, no order, no split by residency"},
        B * (4 * N + 8 * k + 4),
        [lambda s=s: call(s) for s in given],
        check,
    )


Build = Callable[[], Case]


def pairs(pools: Pools) -> list[tuple[Build, Build]]:
    """(ours, FlashInfer's) for each size."""
    found: list[tuple[Build, Build]] = [
        (
            lambda B=B, n=n: gpu_kernels.attention(pools, B, n, n),
            lambda B=B, n=n: attention(pools, B, n),
        )
        for B, n in ((1, 64), (16, 64), (64, 64))
    ]
    found += [
        (
            lambda B=B, N=N: gpu_kernels.selection(pools, B, N, 64),
            lambda B=B, N=N: selection(pools, B, N, 64),
        )
        for B, N in ((1, 4096), (16, 2048), (64, 1024))
    ]
    return found


def measure(out: Path) -> int:
    packages = ("torch", "triton", "flashinfer-python")
    writer, timer = gpu_kernels.open_rows("gpu_rivals", out, packages), gpu_kernels.Timer()
    speed = gpu_kernels.bandwidths(writer, timer)
    done = []
    for ours, rival in pairs(Pools("cuda", PAGES)):
        case = ours()
        done.append(gpu_kernels.add_row(writer, timer, speed, case))
        add_rival(writer, timer, speed, case, rival)
    writer.close()
    return 0 if all(done) else 1


def add_rival(
    writer: gpu_kernels.rows.Writer,
    timer: gpu_kernels.Timer,
    speed: dict[str, float],
    like: Case,
    build: Build,
) -> None:
    """The rival's row, whatever happens; ``like`` is our case of that size."""
    if absence():
        writer.add("flashinfer", "absent", absence(), op=like.op, **like.sizes)
        return
    try:
        case = build()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        writer.add("flashinfer", "failed", reason, op=like.op, **like.sizes)
        print(f"flashinfer {like.op:16} {like.sizes}: FAILED {reason}", flush=True)
        return
    gpu_kernels.add_row(writer, timer, speed, case, "flashinfer")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    arguments = parser.parse_args()
    if why := device_here.refusal(check_only=False):
        print(why, file=sys.stderr)
        return 2
    return measure(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
