"""Decode steps of a whole model on a CUDA device: co-attention against full attention, each at its largest batch.

    python benchmark/gpu_decode.py --check-only       correctness alone; with TRITON_INTERPRET=1 without a device too
    python benchmark/gpu_decode.py --out FILE         then the measurement, on a machine with a CUDA device

Options: --model qwen3-8b,qwen3-14b  --context 32768,65536  --host-gb N (of page-locked pages; most of what is free)
--budget TOKENS  --steps N  --seconds N (stop in time; what was not reached is a row)  --skip-check.

Layers have the model's sizes and random weights (decode_rig.py). How the important pages drift is set by a generator,
q(t+1) = rho q(t) + sqrt(1 - rho^2) noise, whose rho is calibrated to the paper's Figures 6a and 6b: without recall
12 % of the selected pages are no longer resident after 8.7 steps (its mean recall interval at its threshold). Rows at
half and at twice that drift, in 1 - rho, show how much the result depends on it.

Rows (format: rows.py); `model`, `context`, `batch`, `step_us` in samples_us, `tokens_per_s`, and
    full-triton       all KV on the device, at the largest batch that fits, with this project's kernel. It keeps fp32
                      accuracy by three products where others make one, so it is no stand-in for stock attention
    full-flashinfer   the same with FlashInfer, which stock SGLang uses; absent where that is not installed
    scout             co-attention; with rho, precompute, recall, cache (`budget`: as many resident pages as all rows
                      select, the paper's; `device`: all that its memory holds, of which a step attends to the selected
                      ones), cpu_compute_ratio, wait_share (of the step's time), fallback_pages, resident_pages,
                      mapped_share (of the arena, by the worker, before the first step), full_batch (that of full
                      attention) and beyond_full: whether the batch is larger than it, without which the comparison
                      says nothing. The last variant is the first again, with repeat = 1: what lies between the two is
                      how much the order of the variants matters

Nobody joins or leaves, and no server is around the steps: an upper bound of what one can reach.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import device_here
import rows
from decode_rig import PAGE, SIZES, DummyModel, ModelSize, QueryDrift, Rig, Store
from full_rig import FullRig
from sglang_scout.worker.cpus import reserve_server_cores
from sglang_scout.worker.host_memory import available_bytes

WARM_UP_STEPS = 24
MAPPED_S = 45.0
"""The longest to wait until the worker has mapped the arena."""
FIGURE_6_STEPS, FIGURE_6_RATIO = 8.7, 0.12
DEVICE_RESERVE_BYTES = 6 * 2**30  # for graphs, activations and what else a server keeps


# Correctness --------------------------------------------------------------------------------------


def check(device: str) -> list[str]:
    """What is wrong with the first batch of which anything is; empty if nothing is.

    Says of each kind of step how it went as soon as it has, so that a log which is cut short says how far
    it got.
    """
    for batch in (1, 3) if device == "cpu" else (1, 4, 16, 64):
        wrong = []
        begin = time.monotonic()
        for kind, found in findings(device, batch, steps=6 if device == "cpu" else 40):
            took_s = time.monotonic() - begin
            print(
                f"batch {batch}, {kind}: {'; '.join(found) or 'equal'}, {took_s:.0f} s", flush=True
            )
            wrong += [f"batch {batch}, {kind}: {line}" for line in found]
            begin = time.monotonic()
        if wrong:
            return wrong
    return []


def findings(device: str, batch: int, steps: int) -> Iterator[tuple[str, list[str]]]:
    """Each kind of step of a batch, with what is wrong with it."""
    size = SIZES["tiny"]
    expected: list[torch.Tensor] = []
    for kind in ("verified", "replayed", "off"):
        if kind == "replayed" and device == "cpu":
            continue
        outputs, wrong = [], []
        store = Store(
            size, pages=1 + batch * 28, batch=batch, budget_pages=4, device=device,
            dtype=torch.float32, cpus=_cpus()[:2],
        )  # fmt: skip
        rig = None
        try:
            model = DummyModel(size, torch.float32, device)
            drift = QueryDrift(size, batch, 0.9, device)
            settings = '{"recall": "%s"}' % ("off" if kind == "off" else "fixed")
            rig = Rig(
                store, model, drift, batch=batch, context=20 * PAGE - 3, budget_tokens=4 * PAGE,
                settings=settings, graph=kind == "replayed", verify=kind == "verified",
                strict=kind == "off",
            )  # fmt: skip
            for _ in range(steps):
                rig.step()  # of "off" the host may not wait for the device in it
                outputs.append(rig.out.cpu())
                if faults := store.ring.faults():  # nor have later steps a result
                    raise RuntimeError(f"step {len(outputs) - 1}: {'; '.join(faults)}")
            counters = rig.engine.counters
            if counters.cpu_pages == 0:
                wrong.append("no page was missing, nothing was tested")
            error = counters.verify_max_rel_error
            if kind == "verified" and not 0 < error <= 1e-5:
                wrong.append(f"relative error {error:g} against the plain reference")
        except RuntimeError as failure:
            wrong.append(str(failure))
        finally:
            if rig is not None:
                rig.close()
            store.close()
        if kind == "verified":
            expected = outputs
        elif kind == "replayed":
            differ = (not torch.equal(a, b) for a, b in zip(expected, outputs, strict=False))
            if (step := next((i for i, other in enumerate(differ) if other), None)) is not None:
                wrong.append(f"step {step} differs from the eager one")
        yield kind, wrong


# Measurement --------------------------------------------------------------------------------------


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
    """The drift at which, without recall, Figure 6's share of the selection is new after its steps."""
    low, high = 0.9, 0.99999
    pages = context // PAGE
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=store.device)[None]
    n_full = torch.full((1,), pages, dtype=torch.int32, device=store.device)
    from sglang_scout.engine.pools import DigestPool

    digests = DigestPool(store.shape, store.arena.spec.num_pages, store.device)
    layers = range(0, size.layers, max(1, size.layers // 4))
    ids = np.arange(1, pages + 1, dtype=np.int64)
    digests.build(ids, store.host)
    for _ in range(12):
        rho = (low + high) / 2
        ratios = []
        for steps in (int(FIGURE_6_STEPS), int(FIGURE_6_STEPS) + 1):
            drift = QueryDrift(size, 1, rho, store.device)
            before = {
                x: _top(digests, store, x, drift.q[x], table, n_full, budget_pages) for x in layers
            }
            for _ in range(steps):
                drift.advance()
            after = {
                x: _top(digests, store, x, drift.q[x], table, n_full, budget_pages) for x in layers
            }
            new = [float((~torch.isin(after[x], before[x])).float().mean()) for x in layers]
            ratios.append(float(np.mean(new)))
        share = FIGURE_6_STEPS % 1
        ratio = ratios[0] * (1 - share) + ratios[1] * share
        low, high = (low, rho) if ratio < FIGURE_6_RATIO else (rho, high)
    return (low + high) / 2


def _top(digests: Any, store: Store, layer: int, q: torch.Tensor, table: torch.Tensor,
         n_full: torch.Tensor, k: int) -> torch.Tensor:  # fmt: skip
    scores = digests.score(layer, q.contiguous(), table, n_full, store.shape.scale, "mass")
    return scores[0].topk(min(k, table.shape[1])).indices


def free_device() -> None:
    """Rigs refer to themselves through what they hand to their engines, so memory waits for this."""
    gc.collect()
    torch.cuda.empty_cache()


def full_rows(
    writer: rows.Writer, model: DummyModel, name: str, context: int, steps: int, kind: str
) -> int:
    """Returns the batch."""
    size = SIZES[name]
    kv_bytes = 2 * size.layers * context * size.kv_heads * size.head_dim * 2
    free = torch.cuda.mem_get_info()[0] - DEVICE_RESERVE_BYTES
    batch = free // kv_bytes
    sizes = {"model": name, "context": context, "batch": int(batch)}
    if batch < 1:
        writer.add(kind, "skipped", "not one request fits the device", **sizes)
        return 0
    rig = None
    try:
        rig = FullRig(model, size, int(batch), context, kind)
        step_times_us(rig.graph.replay, 4)
        report(writer, kind, sizes, step_times_us(rig.graph.replay, steps))
    except ImportError as error:
        writer.add(kind, "absent", str(error), **sizes)
    except Exception as error:  # a rival that does not run is a row, not the end
        writer.add(kind, "failed", f"{type(error).__name__}: {error}"[:500], **sizes)
    rig = None
    free_device()
    return int(batch)


def scout_rows(
    writer: rows.Writer,
    model: DummyModel,
    name: str,
    context: int,
    options: argparse.Namespace,
    in_time: Callable[[], bool],
    full_batch: int,
) -> float:
    """Returns the seconds until the store was ready, which its next one will take, too."""
    begin, ready_s = time.monotonic(), 0.0
    size = SIZES[name]
    budget_pages = options.budget // PAGE
    room = 2 + (WARM_UP_STEPS + options.steps) // PAGE
    page_bytes = 2 * size.layers * PAGE * size.kv_heads * size.head_dim * 2
    batch = int(options.host_gb * 2**30 // ((context // PAGE + room) * page_bytes))
    sizes: dict[str, Any] = {"model": name, "context": context, "batch": batch}
    if batch < 1:
        writer.add("scout", "skipped", f"not one request fits {options.host_gb} GiB", **sizes)
        return ready_s
    sizes |= {"full_batch": full_batch, "beyond_full": batch > full_batch}
    if batch <= full_batch:
        print(
            f"WARNING: {name}, context {context}: {options.host_gb:.0f} GiB of host pages hold {batch} requests, "
            f"the device {full_batch}: no larger batch to gain from; raise --host-gb",
            flush=True,
        )
    if not in_time():
        writer.add("scout", "skipped", "no time left", **sizes)
        return ready_s
    try:
        store = Store(
            size, pages=1 + batch * (context // PAGE + room), batch=batch, budget_pages=budget_pages,
            dtype=torch.bfloat16, device="cuda", cpus=reserve_server_cores(_cpus()),
        )  # fmt: skip
    except Exception as error:
        writer.add("scout", "failed", f"{type(error).__name__}: {error}"[:500], **sizes)
        return ready_s
    try:
        rho = calibrated_rho(store, size, context, budget_pages)
        sizes["mapped_share"] = store.wait_mapped(MAPPED_S)
        ready_s = time.monotonic() - begin
        print(f"{name}, context {context}: host pages ready after {ready_s:.0f} s", flush=True)
        seen: list[Any] = []
        for variant in variants():
            settings, factor, cache = variant
            about = {**sizes, "rho": 1 - (1 - rho) * factor, "drift": factor, "cache": cache}
            about |= settings
            if repeat := seen.count(variant):
                about["repeat"] = repeat
            seen.append(variant)
            if not in_time():
                writer.add("scout", "skipped", "no time left", **about)
                continue
            try:
                one(writer, store, model, about, settings, options, room)
            except Exception as error:  # one that fails is a row, not the end
                writer.add("scout", "failed", f"{type(error).__name__}: {error}"[:500], **about)
            free_device()
    finally:
        store.close()
    return ready_s


def variants() -> Iterator[tuple[dict[str, Any], float, str]]:
    """The four corners of the paper's ablation, a larger cache, how much the drift matters, and how much the order of
    all these: the first again."""
    for precompute in (True, False):
        for recall in ("adaptive", "off"):
            yield {"precompute": precompute, "recall": recall}, 1.0, "budget"
    yield {"precompute": True, "recall": "adaptive", "attend": "selected"}, 1.0, "device"
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
    rig = Rig(
        store, model, drift, batch=about["batch"], context=about["context"],
        budget_tokens=options.budget, room=room, settings=json.dumps(settings), graph=True,
        slots=None if about["cache"] == "budget" else slots_of_device(store),
    )  # fmt: skip
    try:
        step_times_us(rig.step, WARM_UP_STEPS)
        counters = rig.engine.counters
        before = counters.cpu_pages, counters.budget_pages, counters.gpu_wait_us
        times = step_times_us(rig.step, options.steps)
        pages, budget, waited = (
            now - then
            for now, then in zip(
                (counters.cpu_pages, counters.budget_pages, counters.gpu_wait_us),
                before,
                strict=True,
            )
        )
        report(
            writer, "scout", about, times,
            cpu_compute_ratio=round(pages / max(budget, 1), 4),
            wait_share=round(waited / max(sum(times), 1), 4),
            fallback_pages=store.worker.snapshot().fallback_pages,
            resident_pages=rig.engine.table.resident_pages,
        )  # fmt: skip
    finally:
        rig.close()


def slots_of_device(store: Store) -> int:
    """Pages that the device's free memory holds beside their digests, tails and copies under way."""
    shape, pages = store.shape, store.arena.spec.num_pages
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    free = torch.cuda.mem_get_info()[0] - DEVICE_RESERVE_BYTES - pages * page_bytes // PAGE
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
    end = time.monotonic() + options.seconds

    ready_s = 0.0  # the longest that host pages took

    def in_time(needed_s: float = 0.0) -> bool:
        return time.monotonic() + needed_s < end

    for name in options.model:
        model = DummyModel(SIZES[name], torch.bfloat16, "cuda")
        for context in options.context:
            if not in_time(ready_s):
                writer.add("scout", "skipped", "no time left", model=name, context=context)
                continue
            full = full_rows(writer, model, name, context, options.steps, "full-triton")
            took_s = scout_rows(writer, model, name, context, options, in_time, full)
            ready_s = max(ready_s, took_s)
            free_device()
            if in_time():  # last: it compiles for a minute or two
                full_rows(writer, model, name, context, options.steps, "full-flashinfer")
        del model
        free_device()
    writer.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines; more are appended")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--model", type=lambda s: s.split(","), default=["qwen3-8b"])
    parser.add_argument(
        "--context", type=lambda s: [int(x) for x in s.split(",")], default=[32768, 65536]
    )
    parser.add_argument("--host-gb", type=float, default=0.8 * available_bytes() / 2**30)
    parser.add_argument("--skip-check", action="store_true", help="it has just been made")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    unknown = set(options.model) - set(SIZES)
    if unknown:
        parser.error(f"--model {','.join(sorted(unknown))}: choose of {', '.join(SIZES)}")
    if why := device_here.refusal(check_only=options.check_only, needs_worker=True):
        print(why, file=sys.stderr)
        return 2
    wrong = [] if options.skip_check else check(device_here.device())
    for line in wrong:
        print(f"FAILED: {line}")
    if wrong or options.check_only:
        print("the checks failed" if wrong else "equal")
        return 1 if wrong else 0
    if options.out is None:
        parser.error("--out FILE is missing")
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
