"""Decode steps of a whole model on a CUDA device: co-attention against full attention, each at its largest batch.

    python -m benchmark.decode.gpu_decode --check-only    correctness; with TRITON_INTERPRET=1 without a device too
    python -m benchmark.decode.gpu_decode --out FILE      the measurement, on a machine with a CUDA device

Options: --model qwen3-8b qwen3-14b  --context 32768 65536 16384  --budget TOKENS  --steps N
--host-gb N (of page-locked pages; most of what is free).

Layers have the model's sizes and random weights (harness.py). How the important pages drift is set by a generator,
q(t+1) = rho q(t) + sqrt(1 - rho^2) noise, whose rho is calibrated to the paper's Figures 6a and 6b: without recall
12 % of the selected pages are no longer resident after 8.7 steps. Rows at
half and at twice that drift, in 1 - rho, show how much the result depends on it.

Rows (format: rows.py); `model`, `context`, `batch`, `step_us` in samples_us, `tokens_per_s`, and
    full-flashinfer   all KV on the device, at the largest batch that fits, with FlashInfer, which stock SGLang uses;
                      absent where that is not installed
    scout             co-attention; with rho, precompute, recall, cache (`budget`: as many resident pages as all rows
                      select, the paper's; `device`: all that its memory holds, of which a step attends to the selected
                      ones), cpu_compute_ratio, wait_share (of the step's time), fallback_pages, resident_pages,
                      mapped_share (of the arena, by the worker, before the first step), full_batch (that of full
                      attention) and beyond_full: whether the batch is larger than it, without which the comparison
                      says nothing; policy: infinigen's route fetches the missing pages, scout's computes them;
                      work, as of cli/step_model.py; kv: dtype of the pages, at the first context also e4m3, as many
                      requests in half the host memory; attend_kernel: flash, where it can run. The last variant is the
                      first again, with repeat = 1: what lies between the two is how much the order matters
    profile           of the first variant: launches of a layer, and each kernel's launches and us in one, by torch's
                      profiler

Nobody joins or leaves, and no server is around the steps: an upper bound of what one can reach.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmark import device, rows
from benchmark.decode.check import check
from benchmark.decode.full_attention import FullAttention
from benchmark.decode.harness import PAGE, Harness, Store
from benchmark.decode.launches import add_profile
from benchmark.decode.model import SIZES, DummyModel, ModelSize, QueryDrift, bisect_rho, step_work
from sglang_scout.core.config import DEFAULT_BUDGET_TOKENS, DEFAULT_DIGEST
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.page_bytes import digest_bytes
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.offered import Offered
from sglang_scout.worker.cpus import reserve_server_cores
from sglang_scout.worker.host_memory import available_bytes

WARM_UP_STEPS = 24
MAPPED_S = 45.0
"""The longest to wait until the worker has mapped the arena."""
DEVICE_RESERVE_BYTES = 6 * 2**30  # for graphs, activations and what else a server keeps


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def step_times_us(step: Callable[[], None], steps: int) -> list[float]:
    """Times of steps that follow each other without a pause, between events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for i in range(steps):
        step()
        events[i + 1].record()
    torch.cuda.synchronize()
    pairs = zip(events[:-1], events[1:], strict=True)
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def calibrated_rho(store: Store, size: ModelSize, context: int, budget_pages: int) -> float:
    """Of queries, with the store's digests, as bisect_rho has it."""
    pages = context // PAGE
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=store.device)[None]
    n_full = torch.full((1,), pages, dtype=torch.int32, device=store.device)
    offered = Offered.of(table, n_full, 1)
    digests = DigestPool(store.shape, store.arena.spec.num_pages, store.device, DEFAULT_DIGEST)
    digests.build(np.arange(1, pages + 1, dtype=np.int64), store.host)
    layers = range(0, size.layers, max(1, size.layers // 4))
    source = torch.Generator(store.device).manual_seed(1)
    shape = (2, len(layers), 1, size.q_heads, size.head_dim)
    q, noise = torch.randn(shape, generator=source, device=store.device)

    def chosen(queries: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for layer, query in zip(layers, queries, strict=True):
            scores = digests.score(layer, query, offered, store.shape.scale, "mass")
            found.append(scores[0].topk(min(budget_pages, pages)).indices)
        return found

    before = chosen(q)

    def new_share(kept: float) -> float:
        after = chosen(kept * q + (1 - kept**2) ** 0.5 * noise)
        new = [(~torch.isin(a, b)).float().mean() for a, b in zip(after, before, strict=True)]
        return float(torch.stack(new).mean())

    return bisect_rho(new_share)


def free_device() -> None:
    """Harnesses refer to themselves through what they hand to their engines, so memory waits for this."""
    gc.collect()
    torch.cuda.empty_cache()


def full_batch_of(size: ModelSize, context: int) -> int:
    """Requests whose whole KV the device holds."""
    kv_bytes = 2 * size.layers * context * size.kv_heads * size.head_dim * 2
    return max(0, (torch.cuda.mem_get_info()[0] - DEVICE_RESERVE_BYTES) // kv_bytes)


def full_row(
    writer: rows.Writer, model: DummyModel, name: str, context: int, steps: int, batch: int
) -> None:
    kind, sizes = "full-flashinfer", {"model": name, "context": context, "batch": batch}
    if batch < 1:
        writer.add(kind, "skipped", "not one request fits the device", **sizes)
        return
    try:
        harness = FullAttention(model, SIZES[name], batch, context)
        step_times_us(harness.graph.replay, 4)
        report(writer, kind, sizes, step_times_us(harness.graph.replay, steps))
    except ImportError as error:
        writer.add(kind, "absent", str(error), **sizes)
    except Exception as error:  # a baseline that does not run is a row, not the end
        writer.add(kind, "failed", f"{type(error).__name__}: {error}"[:500], **sizes)
    harness = None
    free_device()


def scout_rows(
    writer: rows.Writer, model: DummyModel, name: str, context: int, options: argparse.Namespace,
    full_batch: int, fp8: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Rows of all variants, with ``fp8`` pages of the first; one that fails is a row, not the end."""
    size = SIZES[name]
    room = 2 + (WARM_UP_STEPS + options.steps) // PAGE
    page_bytes = 2 * size.layers * PAGE * size.kv_heads * size.head_dim * 2
    batch = int(options.host_gb * 2**30 // ((context // PAGE + room) * page_bytes))
    sizes: dict[str, Any] = {"model": name, "context": context, "batch": batch}
    sizes["kv"] = str(fp8 or torch.bfloat16).removeprefix("torch.")
    if batch < 1:
        writer.add("scout", "skipped", f"not one request fits {options.host_gb} GiB", **sizes)
        return
    sizes |= {"full_batch": full_batch, "beyond_full": batch > full_batch}
    if batch <= full_batch:
        print(f"WARNING: {options.host_gb:.0f} GiB of host pages hold {batch} requests, the device {full_batch}: "
              "no larger batch to gain from; raise --host-gb", flush=True)  # fmt: skip
    try:
        store = Store(
            size, pages=1 + batch * (context // PAGE + room), batch=batch,
            budget_pages=options.budget // PAGE, dtype=torch.bfloat16, device="cuda",
            cpus=reserve_server_cores(_cpus()), fp8=fp8,
        )  # fmt: skip
    except Exception as error:
        writer.add("scout", "failed", f"{type(error).__name__}: {error}"[:500], **sizes)
        return
    try:
        rho = calibrated_rho(store, size, context, options.budget // PAGE)
        sizes["mapped_share"] = store.wait_mapped(MAPPED_S)
        seen: list[Any] = []
        for variant in itertools.islice(variants(), 1 if fp8 else None):
            settings, factor, cache = variant
            about = {**sizes, "rho": 1 - (1 - rho) * factor, "drift": factor, "cache": cache}
            about |= {"policy": "scout"} | settings | {"repeat": seen.count(variant)}
            seen.append(variant)
            try:
                one(writer, store, model, about, settings, options, room)
            except Exception as error:
                status = "absent" if isinstance(error, ConfigError) else "failed"
                writer.add("scout", status, f"{type(error).__name__}: {error}"[:500], **about)
            free_device()
    finally:
        store.close()


def variants() -> Iterator[tuple[dict[str, Any], float, str]]:
    """The four corners of the paper's ablation, the other route of missing pages, a larger cache, the other attention,
    how much the drift matters, and how much the order of all these: the first again."""
    for precompute in (True, False):
        for recall in ("adaptive", "off"):
            yield {"precompute": precompute, "recall": recall}, 1.0, "budget"
    yield {"policy": "infinigen"}, 1.0, "budget"
    yield {"precompute": True, "recall": "adaptive", "attend": "selected"}, 1.0, "device"
    yield {"precompute": True, "recall": "adaptive", "attend_kernel": "flash"}, 1.0, "budget"
    for factor in (0.5, 2.0, 1.0):
        yield {"precompute": True, "recall": "adaptive"}, factor, "budget"


def one(
    writer: rows.Writer,
    store: Store,
    model: DummyModel,
    about: dict[str, Any],
    settings: dict[str, Any],
    options: argparse.Namespace,
    room: int,
) -> None:
    size = SIZES[about["model"]]
    drift = QueryDrift(size, about["batch"], about["rho"], "cuda")
    harness = Harness(
        store, model, drift, batch=about["batch"], context=about["context"],
        budget_tokens=options.budget, room=room, graph=True, policy=about["policy"],
        settings=json.dumps({key: x for key, x in settings.items() if key != "policy"}),
        slots=None if about["cache"] == "budget" else slots_of_device(store),
    )  # fmt: skip
    try:
        step_times_us(harness.step, WARM_UP_STEPS)
        counters = harness.engine.counters
        before = counters.cpu_pages, counters.budget_pages, counters.gpu_wait_us
        times = step_times_us(harness.step, options.steps)
        after = counters.cpu_pages, counters.budget_pages, counters.gpu_wait_us
        pages, budget, waited = (now - then for now, then in zip(after, before, strict=True))
        report(
            writer, "scout", about, times,
            cpu_compute_ratio=round(pages / max(budget, 1), 4),
            wait_share=round(waited / max(sum(times), 1), 4),
            fallback_pages=store.worker.snapshot().fallback_pages,
            resident_pages=harness.engine.table.resident_pages,
            work=step_work(
                size, about["context"], options.budget, store.shape.dtype.itemsize, store.shape.kv_dtype.itemsize
            ),
        )  # fmt: skip
        if not any(row["impl"] == "profile" for row in writer.rows):
            add_profile(writer, harness.step, size.layers, about)
    finally:
        harness.close()


def slots_of_device(store: Store) -> int:
    """Pages that the device's free memory holds beside their digests, tails and copies under way."""
    shape, pages = store.shape, store.arena.spec.num_pages
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    of_layer = digest_bytes(
        DEFAULT_DIGEST, shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize
    )
    free = torch.cuda.mem_get_info()[0] - DEVICE_RESERVE_BYTES
    free -= pages * shape.num_layers * of_layer
    beside = store.batch + store.arena.spec.max_pages
    return max(store.batch, min(free // page_bytes, pages) - beside)


def report(
    writer: rows.Writer, impl: str, sizes: dict[str, Any], times: list[float], **more: Any
) -> None:
    row = writer.add(impl, **sizes, **more, **rows.summary(times), tokens_per_s=round(
        sizes["batch"] * len(times) / (sum(times) / 1e6), 1))  # fmt: skip
    print(
        f"{impl:16} {sizes}: step {row['median_us'] / 1e3:.2f} ms, {row['tokens_per_s']} tokens/s "
        + " ".join(f"{k}={v}" for k, v in more.items()),
        flush=True,
    )


def measure(options: argparse.Namespace) -> int:
    shared = rows.environment("gpu_decode", ("torch", "triton", "flashinfer-python"), cuda=True)
    shared |= {"device": torch.cuda.get_device_name(), "budget": options.budget,
               "host_gb": options.host_gb}  # fmt: skip
    writer = rows.Writer(options.out, shared, append=True)
    for name in options.model:
        model = DummyModel(SIZES[name], torch.bfloat16, "cuda")
        for context in options.context:
            full = full_batch_of(SIZES[name], context)
            scout_rows(writer, model, name, context, options, full)
            free_device()
            if context == options.context[0]:
                scout_rows(writer, model, name, context, options, full, torch.float8_e4m3fn)
                free_device()
            # Last: it compiles for a minute or two where that has not been done.
            full_row(writer, model, name, context, options.steps, full)
        del model
        free_device()
    writer.close()
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["qwen3-8b"])
    parser.add_argument("--context", nargs="+", type=int, default=[32768, 65536, 16384])
    parser.add_argument("--host-gb", type=float, default=0.8 * available_bytes() / 2**30)
    parser.add_argument("--budget", type=int, default=DEFAULT_BUDGET_TOKENS)
    parser.add_argument("--steps", type=int, default=64)


def check_all(device_type: str) -> int:
    wrong = check(device_type)
    return device.say("\n".join(f"FAILED: {line}" for line in wrong))


if __name__ == "__main__":
    sys.exit(device.run(__doc__, check_all, measure, needs_worker=True, add_options=add_options))
