"""Latency of a step boundary: the host's work between two decode steps.

    taskset -c 0 env OMP_NUM_THREADS=1 python -m benchmark.decode.boundary --json FILE

With a device, the boundary overlaps the running step (docs/gpu-design.md). Here engine, residency table,
policy and boundary are real, on pages so small (1 KV head of 16) that copying them is negligible. The step is not run:
a generator writes what it would have selected. Page scores are Gaussian and follow
s(t+1) = rho s(t) + sqrt(1 - rho^2) noise, with rho calibrated to the paper's Figures 6a and 6b: 12 % of the selected
pages have changed after 8.7 steps. As many pages are resident as all rows select.

Rows (format: rows.py), one per batch:
    layers, context, budget, batch, recall      sizes
    samples_us, median_us                       of `begin_step`
    recalled, cpu_compute_ratio                 pages copied per step, and share of selected pages that are missing
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmark import rows
from benchmark.decode.model import bisect_rho
from sglang_scout.core.config import parse_config
from sglang_scout.engine.build import build_engine
from sglang_scout.engine.stores import HostPages, ModelShape, Sizes
from sglang_scout.ops.op import Op
from sglang_scout.policy.base import Context, make_policy, policies

PAGE = 32
WARM_UP_STEPS = 24
SIZES = {"layers": 36, "context": 65536, "budget": 2048, "recall": "adaptive"}
LAYERS, CONTEXT, BUDGET, RECALL = SIZES.values()


class Drift:
    """The columns that each layer and row selects, drifting from step to step; always the first and the newest."""

    def __init__(self, layers: int, batch: int, pages: int, budget: int, rho: float) -> None:
        self._source = torch.Generator().manual_seed(1)
        self._budget, self._rho = budget, rho
        self._scores = torch.randn(layers, batch, pages, generator=self._source)

    def advance(self) -> None:
        noise = torch.randn(self._scores.shape, generator=self._source)
        self._scores.mul_(self._rho).add_(noise, alpha=(1 - self._rho**2) ** 0.5)

    def columns(self, n_full: torch.Tensor) -> torch.Tensor:
        """``[L, B, k]`` for rows of ``n_full`` ``[B]`` pages."""
        behind = torch.arange(self._scores.shape[2]) >= n_full[:, None]
        scores = self._scores.masked_fill(behind, -torch.inf)
        scores[:, :, 0] = torch.inf
        scores[:, torch.arange(len(n_full)), n_full - 1] = torch.inf
        return scores.topk(self._budget, dim=2).indices


def calibrated_rho() -> float:
    """rho of the scores, by bisect_rho."""
    source = torch.Generator().manual_seed(5)
    before, noise = torch.randn(2, 256, CONTEXT // PAGE, generator=source).unbind()
    budget = BUDGET // PAGE
    chosen = before.topk(budget).indices

    def new_share(kept: float) -> float:
        after = (kept * before + (1 - kept**2) ** 0.5 * noise).topk(budget).indices
        return 1 - (after[:, :, None] == chosen[:, None, :]).any(2).float().mean().item()

    return bisect_rho(new_share)


class SameThread(Executor):
    """Runs copies in the submitting thread: their time is included, and no other thread competes for the core."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        function(*args, **more)
        done: Future[Any] = Future()
        done.set_result(None)  # no transfer time is reported
        return done


class Bench:
    """An engine whose steps are only selections; requests of equal length decode indefinitely."""

    def __init__(self, batch: int, steps: int, rho: float) -> None:
        budget = BUDGET // PAGE
        each = -(-CONTEXT // PAGE) + 2 + (steps + WARM_UP_STEPS) // PAGE
        shape = ModelShape(LAYERS, 4, 1, 16, PAGE, torch.bfloat16, 0.25)
        config = parse_config(
            policy="scout", policies=policies(), budget_tokens=BUDGET,
            config={"recall": RECALL},
        )  # fmt: skip
        plane = torch.zeros((1 + batch * each) * PAGE, 1, 16, dtype=torch.bfloat16)
        self.engine = build_engine(
            config,
            make_policy(Context(config, LAYERS, 2 * PAGE * 8 * 128 * 2)),
            shape,
            Sizes(budget, budget * batch + batch + budget, batch, each),
            HostPages(shape, [plane] * LAYERS, [plane] * LAYERS),
            [],
            None,  # type: ignore[arg-type]  # nothing is posted
        )
        self.engine.recall.close()
        self.engine.recall._side = SameThread()
        self.pages = 1 + np.arange(batch * each, dtype=np.int32).reshape(batch, each)
        self.slots = np.arange(batch)
        self.lengths = CONTEXT + 7 * np.arange(batch, dtype=np.int64) % PAGE
        self.engine.digests.valid[self.pages[:, : CONTEXT // PAGE]] = True
        self.drift = Drift(LAYERS, batch, each, budget, rho)
        table = self.engine.table
        for layer, chosen in enumerate(self._chosen().numpy()):  # as after long decoding
            table.uses.touch(np.array([layer]), chosen[None], 0, np.zeros(len(chosen), bool))
            table.commit(table.reserve(layer, chosen), 0)

    def step(self) -> float:
        """Runs one step; returns the duration of its boundary in us."""
        self.lengths += 1
        used = -(-int(self.lengths.max()) // PAGE)
        table = self.pages[:, :used].copy()  # as from a request table
        start_ns = time.perf_counter_ns()
        self.engine.begin_step(table, self.slots, self.lengths)
        took_us = (time.perf_counter_ns() - start_ns) / 1e3
        self._select()
        self.drift.advance()
        return took_us

    def _chosen(self) -> torch.Tensor:
        """``[L, B, k]`` pages."""
        columns = self.drift.columns(torch.from_numpy((self.lengths - 1) // PAGE))
        return torch.from_numpy(self.pages).expand(len(columns), -1, -1).gather(2, columns)

    def _select(self) -> None:
        """Writes the results that the step would produce."""
        pages = self._chosen()
        slots = self.engine._slot_of.gather(1, pages.flatten(1).long()).view_as(pages)
        results = self.engine._results
        results.pages[:] = pages
        results.missing[:] = torch.where(slots < 0, pages, -1).sort(2, descending=True).values


def measure(batch: int, steps: int, rho: float) -> dict[str, Any]:
    bench = Bench(batch, steps, rho)
    counters = bench.engine.counters
    with mock.patch.object(Op, "__call__", lambda *args, **kwargs: None):  # a device's to run
        for _ in range(WARM_UP_STEPS):
            bench.step()
        recalled, missing = counters.recalled_pages, counters.cpu_pages
        budget = counters.budget_pages
        times = [bench.step() for _ in range(steps)]
    bench.engine.table.check()
    return rows.summary(times) | {
        "recalled": round((counters.recalled_pages - recalled) / steps, 1),
        "cpu_compute_ratio": round(
            (counters.cpu_pages - missing) / (counters.budget_pages - budget), 4
        ),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    writer = rows.Writer(options.json, rows.environment("boundary", ("torch", "numpy")))
    rho = calibrated_rho()
    for batch in options.batch:
        found = measure(batch, options.steps, rho)
        row = writer.add("boundary", **SIZES, batch=batch, rho=round(rho, 6), **found)
        print(f"batch {batch}: {row['median_us'] / 1e3:.2f} ms (spread {row['spread']:.2f}), "
              f"{row['recalled']} pages recalled, ratio {row['cpu_compute_ratio']}")  # fmt: skip
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
