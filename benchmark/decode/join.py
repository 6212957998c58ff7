"""Cost of an arriving request: pages computed on the CPU in its first steps, and the longest step of the batch.

    python -m benchmark.decode.join --json FILE

Engine, ring and attention process are real, the model has random weights and is small (`harness.py`). Requests decode,
then one more joins: warm, with the hint that a prefill server sends for its last token (`engine/hints.py`), copied
concurrently with a step of the others, or cold. Predictions are perfect here, so that only residency matters.

Rows (format: rows.py), one per run:
    arrival                  hint, none
    context, budget, batch   sizes; batch includes the arriving request
    cpu_pages                of the arriving request, over all layers, in each of its first 16 steps
    samples_us, median_us    of steps before its arrival
    longest_us               of the steps from its arrival to its 16th
    waited_steps             from its arrival until it joins
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmark import rows
from benchmark.decode.harness import PAGE, Harness, Store
from benchmark.decode.model import DummyModel, ModelSize, QueryDrift
from sglang_scout.engine.digest_pool import choose_hint

SIZE = ModelSize(4, 256, 8, 2, 64, 512)
RHO = 0.99
STEPS_BEFORE, STEPS_AFTER = 16, 16


def timed(harness: Harness) -> float:
    start_ns = time.perf_counter_ns()
    harness.step()
    return (time.perf_counter_ns() - start_ns) / 1e3


def measure(store: Store, with_hint: bool, context: int, budget: int, batch: int) -> dict[str, Any]:
    model = DummyModel(SIZE, store.shape.dtype, store.device)
    drift = QueryDrift(SIZE, batch, RHO, store.device)
    harness = Harness(
        store, model, drift, batch=batch, context=context, budget_tokens=budget, graph=False
    )
    try:
        engine, newcomer = harness.engine, batch - 1
        full = harness.pages[newcomer, : int(harness.lengths[newcomer]) // PAGE].astype("int64")
        engine.digests.build(full, store.host)  # as sent by the prefill server
        harness.rows = newcomer
        before = [timed(harness) for _ in range(STEPS_BEFORE)][STEPS_BEFORE // 2 :]
        after, pages = [], []
        if with_hint:
            scale = store.shape.scale
            queries = drift.q[:, newcomer]
            hint = choose_hint(engine.digests, queries, full, engine.policy.digest, scale)
            engine.boundary.arrivals.add(newcomer, full, hint)
            while engine.boundary.arrivals.queue([newcomer], room=1):
                after.append(timed(harness))
            engine.boundary.arrivals.admit(newcomer, newcomer)
        waited = len(after)
        harness.rows = batch
        for _ in range(STEPS_AFTER):
            after.append(timed(harness))
            pages.append(int((engine._results.missing[:, newcomer] >= 0).sum()))
    finally:
        harness.close()
    return rows.summary(before) | {
        "cpu_pages": pages,
        "longest_us": round(max(after), 1),
        "waited_steps": waited,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    sizes = {"context": options.context, "budget": options.budget, "batch": options.batch}
    writer = rows.Writer(options.json, rows.environment("join", ("torch", "numpy")))
    store = Store(
        SIZE, pages=1 + options.batch * (-(-options.context // PAGE) + 8), batch=options.batch,
        budget_pages=options.budget // PAGE, dtype=torch.float32, device="cpu",
        cpus=sorted(os.sched_getaffinity(0)), from_device=False,
    )  # fmt: skip
    try:
        for repeat in range(options.repeats):
            for arrival in ("none", "hint"):
                found = measure(store, arrival == "hint", **sizes)
                writer.add("join", arrival=arrival, repeat=repeat, **sizes, **found)
                print(f"{arrival}: CPU pages {found['cpu_pages']}, a step {found['median_us'] / 1e3:.1f} ms, "
                      f"the longest {found['longest_us'] / 1e3:.1f} ms")  # fmt: skip
    finally:
        store.close()
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
