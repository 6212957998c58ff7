"""Decode steps of the CPU device and the rates of their parts, to validate the step model.

    python -m benchmark.decode.cpu_step --out docs/results/step_model.jsonl

The model used by ``sglang-scout plan --gpu`` (cli/step_model.py) gets the rates of this machine, each measured
separately between the steps, and the steps' sizes; test/cli/test_step_model.py compares. The device is one CPU, CPU
attention has another. Steps are those of harness.py, fp32, posted from the host; boundaries are excluded.

The machine may be shared. So all times are CPU time of the threads that do the work, without waiting for each other.
And each rate is measured once after every step, taking the median of its own samples, so that steps and rates see the
same slowdowns.

Rows (format: rows.py), one per batch, context and budget: `samples_us` of a step, `work` and `device` as in
step_model.py, `missing_share` of the budget, `clock`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark import rows
from benchmark.decode.harness import PAGE, Harness, Store
from benchmark.decode.model import SIZES, DummyModel, ModelSize, QueryDrift, step_work
from benchmark.kernels.read_loop import ReadLoop
from sglang_scout.cli.step_model import LAUNCHES
from sglang_scout.engine.step_inputs import Offered
from sglang_scout.ops.attend import attend_pages

SIZE = SIZES["cpu"]
BATCHES, CONTEXTS, BUDGETS = (1, 4, 8), (2048, 4096), (256, 1024)
ROOM, WARM_UP, STEPS, RHO = 4, 6, 20, 0.98
VALUE_BYTES = 4


def cpu_us(call: Callable[[], object]) -> float:
    """CPU time of a call, including other threads, as the read loop has its own."""
    begin = time.process_time_ns()
    call()
    return (time.process_time_ns() - begin) / 1e3


class Rates:
    """Bytes per microsecond of a step's parts in isolation, at one size; of matrix products also by batch."""

    def __init__(self, store: Store, harness: Harness, model: DummyModel, cpu: int) -> None:
        self._model = model
        batch, columns = 4, CONTEXTS[-1] // PAGE
        chosen = BUDGETS[-1] // PAGE
        ids = torch.randperm(batch * columns).int().view(batch, columns) + 1
        query = torch.randn(batch, SIZE.q_heads, SIZE.head_dim)
        offered = Offered.of(ids, torch.full((batch,), columns, dtype=torch.int32), 1)
        scale, layers = store.shape.scale, range(SIZE.layers)
        pool = store.host.k, store.host.v
        page = PAGE * SIZE.kv_heads * SIZE.head_dim * VALUE_BYTES
        self._work = step_work(SIZE, CONTEXTS[-1], BUDGETS[-1], VALUE_BYTES)
        digests = self._work["digest_bytes"]
        picked = ids[:, :chosen].contiguous()
        loop, order = ReadLoop([cpu]), np.random.permutation(batch * columns).astype(np.int32)

        def read() -> None:
            loop.pages_ns(pool[0][0].data_ptr(), pool[1][0].data_ptr(), page, order, 1)

        self._calls: dict[str, tuple[float, Callable[[], object]]] = {
            "read": (2 * page * len(order), read),
            "scores": (batch * digests, lambda: [
                harness.engine.digests.score(i, query, offered, scale, "mass") for i in layers]),
            "attention": (2 * page * picked.numel() * SIZE.layers, lambda: [
                attend_pages(query, pool[0][i], pool[1][i], picked, None, None, scale)
                for i in layers]),
        }  # fmt: skip

    def products(self, batch: int) -> None:
        """The matrix products of a step."""
        x = torch.randn(batch, SIZE.hidden)
        inner = torch.randn(batch, SIZE.intermediate)
        width = torch.randn(batch, SIZE.q_heads * SIZE.head_dim)
        for w_qkv, w_out, w_up, w_down in self._model.layers:
            for left, right in ((x, w_qkv), (width, w_out), (x, w_up), (inner, w_down)):
                left @ right.T

    def beside(
        self, harness: Harness, tiny: Harness, steps: int
    ) -> tuple[list[float], dict[str, Any]]:
        """Times of steps, interleaved with this machine's rates: fields of ``step_model.Device``, with nothing
        overlapped. A launch costs a layer's time with next to nothing to compute, divided by the launches that the
        model counts."""
        calls = {part: call for part, (_, call) in self._calls.items()}
        calls["weights"] = partial(self.products, harness.rows)
        of_step, of_tiny = timed(harness), timed(tiny)
        taken: dict[str, list[float]] = {part: [] for part in calls}
        for _ in range(WARM_UP + steps):
            harness.step()
            tiny.step()
            for part, call in calls.items():
                taken[part].append(cpu_us(call))
        us = {part: rows.percentile(found[WARM_UP:], 50) for part, found in taken.items()}
        nbytes = {part: size for part, (size, _) in self._calls.items()}
        nbytes["weights"] = self._work["weight_bytes"]
        rates = {part: nbytes[part] / us[part] for part in us}
        read = rates.pop("read")
        reached = {"": 1.0} | {part: rate / read for part, rate in rates.items()}
        reached |= {"look-ahead": reached["weights"], "worker": reached["attention"]}
        layer_us = rows.percentile(of_tiny[WARM_UP:], 50) / tiny.model.size.layers
        gb_s = read / 1e3
        return of_step[WARM_UP:], {
            "memory_gb_s": gb_s, "flop_s": 1e15, "link_gb_s": gb_s, "host_gb_s": gb_s,
            "memory_bytes": 0, "launch_us": layer_us / (LAUNCHES["offload"] + LAUNCHES["ahead"]),
            "boundary_us": [0, 0], "in_order": True, "reached": reached,
        }  # fmt: skip


def timed(harness: Harness) -> list[float]:
    """A list that receives the CPU time of the layers of each step from now on."""
    taken: list[float] = []
    layers = harness._layers

    def call() -> None:
        begin = time.thread_time_ns()
        layers()
        taken.append((time.thread_time_ns() - begin) / 1e3)

    harness._layers = call  # type: ignore[method-assign]
    return taken


def make(size: ModelSize, batch: int, context: int, budget: int, cpus: list[int]) -> Store:
    pages = 1 + batch * (context // PAGE + ROOM)
    return Store(size, pages=pages, batch=batch, budget_pages=budget // PAGE, dtype=torch.float32,
                 device="cpu", cpus=cpus, from_device=False)  # fmt: skip


def harness_of(store: Store, model: DummyModel, batch: int, context: int, budget: int) -> Harness:
    drift = QueryDrift(model.size, batch, RHO, "cpu")
    return Harness(
        store, model, drift, batch=batch, context=context, budget_tokens=budget, room=ROOM,
        slots=max(batch * budget // PAGE, 4 * store.batch), graph=False,
        settings='{"recall": "fixed"}',
    )  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    mine, *others = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    writer = rows.Writer(options.out, rows.environment("cpu_step", ("torch", "sglang-scout")))
    model, tiny = (DummyModel(size, torch.float32, "cpu") for size in (SIZE, SIZES["tiny"]))
    small = 16 * PAGE, 4 * PAGE
    tiny_store = make(tiny.size, 1, *small, others[:1])
    store = make(SIZE, BATCHES[-1], CONTEXTS[-1], BUDGETS[-1], others[:1])
    os.sched_setaffinity(0, {mine})
    first = harness_of(store, model, BATCHES[-1], CONTEXTS[-1], BUDGETS[-1])
    first.step()  # builds the digests
    rates = Rates(store, first, model, mine)
    for batch, context, budget in itertools.product(options.batch, CONTEXTS, BUDGETS):
        harness = harness_of(store, model, batch, context, budget)
        other = harness_of(tiny_store, tiny, 1, *small)
        taken, device = rates.beside(harness, other, options.steps)
        counters = harness.engine.counters
        row = writer.add(
            "scout", batch=batch, context=context, budget=budget, clock="CPU time", device=device,
            missing_share=round(counters.cpu_pages / counters.budget_pages, 4),
            work=step_work(SIZE, context, budget, VALUE_BYTES), **rows.summary(taken),
        )  # fmt: skip
        print({k: row[k] for k in ("batch", "context", "budget", "missing_share", "median_us")},
              flush=True)  # fmt: skip
        harness.close()
        other.close()
    first.close()
    for some in (store, tiny_store):
        some.close()
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=STEPS)
    measure(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
