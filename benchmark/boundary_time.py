"""What does the host do between two decode steps of a device, and how long does it take?

    taskset -c 0 env OMP_NUM_THREADS=1 python benchmark/boundary_time.py --json FILE

Options: --batch 16,64  --layers N  --context TOKENS  --steps N  --recall MODE  --quick.

A device's step is one CUDA graph; beside it the host has as long as the graph runs to prepare the next one
(docs/gpu.md). Here engine, residency table, policy and boundary are the real ones, on CPU tensors of pages so
small (1 KV head of 16) that copying them costs nothing. The graph is not run: a generator writes what it would have
selected. Scores of pages are Gaussian and follow s(t+1) = rho s(t) + sqrt(1 - rho^2) noise, with rho calibrated to
the paper's Figures 6a and 6b: 12 % of the selected pages are others after 8.7 steps. As many pages are resident as all
rows select, and a step may copy as many as 256 MiB hold in a model with 8 KV heads of 128.

Rows (format: rows.py), one per batch; impl is "device-engine":
    layers, context, budget, batch, recall   sizes
    samples_us, median_us, mean_us           the whole of `begin_step`
    parts_us                                 mean of each part of it; "rest" is what is in none
    recalled, cpu_compute_ratio              pages copied in a step, and missing of those selected
    calls                                    mean per step of what a device is asked for: kernels launched, transfers
                                             to and from it, and commands about streams. Counted and not made: their
                                             time comes on top
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rows
from sglang_scout.core.config import RECALL_MODES
from sglang_scout.core.parse_config import parse_config
from sglang_scout.engine import device, device_step, pools, recall, step_inputs
from sglang_scout.engine.device_step import DeviceStepEngine
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape, ResidentCache
from sglang_scout.ops.op import Op
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.presets import POLICY_NAMES, make_policy

PAGE = 32
REAL_PAGE_BYTES = 2 * PAGE * 8 * 128 * 2
FIGURE_6_STEPS, FIGURE_6_SHARE = 8.7, 0.12
FETCHED = 2  # tensors that come back from a step
PARTS = {
    "fetch": "_results.send_for",
    "take in": "_take_in",
    "prepare": "boundary.begin",
    "recall": "_recall_missing",
    "send": "_send",
}


class Drift:
    """Which columns each layer and row selects, from step to step; the first and the newest always."""

    def __init__(self, layers: int, batch: int, pages: int, budget: int, rho: float, seed: int = 1):
        self._source = torch.Generator().manual_seed(seed)
        self._budget, self._rho = budget, rho
        self._scores = torch.randn(layers, batch, pages, generator=self._source)

    def advance(self) -> None:
        noise = torch.randn(self._scores.shape, generator=self._source)
        self._scores.mul_(self._rho).add_(noise, alpha=(1 - self._rho**2) ** 0.5)

    def columns(self, n_full: torch.Tensor) -> torch.Tensor:
        """``[L, B, k]`` for rows of ``n_full`` ``[B]`` pages."""
        scores = self._scores.masked_fill(
            torch.arange(self._scores.shape[2]) >= n_full[:, None], -torch.inf
        )
        scores[:, :, 0] = torch.inf
        scores[:, torch.arange(len(n_full)), n_full - 1] = torch.inf
        return scores.topk(self._budget, dim=2).indices


def calibrated_rho(pages: int, budget: int) -> float:
    """The drift at which Figure 6's share of a selection is new after its steps."""
    low, high = 0.9, 0.99999
    source = torch.Generator().manual_seed(5)
    before, noise = torch.randn(2, 256, pages, generator=source).unbind()
    chosen = before.topk(budget).indices
    for _ in range(20):
        rho = (low + high) / 2
        kept = rho**FIGURE_6_STEPS
        after = (kept * before + (1 - kept**2) ** 0.5 * noise).topk(budget).indices
        share = 1 - (after[:, :, None] == chosen[:, None, :]).any(2).float().mean().item()
        low, high = (low, rho) if share < FIGURE_6_SHARE else (rho, high)
    return (low + high) / 2


class NoRing:
    """What the engine asks of a ring at a boundary."""

    def __init__(self, layers: int) -> None:
        self.waited_ns = torch.zeros(layers, dtype=torch.int64)
        self.state = torch.zeros(4, dtype=torch.int64)

    def errors(self) -> list[str]:
        return []

    def faults(self) -> list[str]:
        return []

    def set_life(self, epoch: int) -> None:
        self.state[0] = epoch

    def begin_step(self, step: int) -> None:
        self.state[1] = step


class Here:
    """A side stream's stand-in: what it is given is over when it returns."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Here:
        function(*args)
        return self

    def exception(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True

    def result(self) -> None:
        return None

    def shutdown(self, wait: bool = True) -> None:
        return None


@contextmanager
def nothing_launched() -> Iterator[dict[str, int]]:
    """Counts what a device would be asked for; kernels outside of the step are not run at all."""
    calls: dict[str, int] = defaultdict(int)
    undo: list[tuple[Any, str, Any]] = []

    def count(owner: Any, name: str, runs: bool = True, **what: int) -> None:
        plain = getattr(owner, name)
        undo.append((owner, name, plain))

        def counted(*args: Any, **kwargs: Any) -> Any:
            for kind, times in what.items():
                calls[kind] += times
            return plain(*args, **kwargs) if runs else None

        setattr(owner, name, counted)

    for module in (device_step, pools, recall, step_inputs):
        if hasattr(module, "upload"):
            count(module, "upload", transfers=1)
    count(device.Staging, "send", transfers=1, stream_commands=1)
    count(device.Fetching, "__init__", transfers=FETCHED, stream_commands=1)
    count(NoRing, "begin_step", kernels=1)
    # An event to wait for, others at begin and end, and the one that waits for it.
    count(Here, "submit", stream_commands=6)
    count(torch.Tensor, "index_copy_", kernels=1)
    count(Op, "__call__", runs=False, kernels=1)
    try:
        yield calls
    finally:
        for owner, name, plain in undo:
            setattr(owner, name, plain)


class Bench:
    """An engine whose steps are only selections; requests of equal length decode on and on."""

    def __init__(self, options: argparse.Namespace, batch: int, rho: float) -> None:
        layers, budget = options.layers, options.budget // PAGE
        each = -(-options.context // PAGE) + 2 + (options.steps + options.warm_up) // PAGE
        pages = 1 + batch * each
        shape = ModelShape(layers, 4, 1, 16, PAGE, torch.bfloat16, 0.25)
        settings: dict[str, Any] = {"recall": options.recall}
        if options.recall == "adaptive":
            settings["recall_step_mib"] = 256 * 2 * shape.page_bytes / REAL_PAGE_BYTES
        config = parse_config(
            policy="scout", policies=POLICY_NAMES, budget_tokens=options.budget,
            config=settings,
        )  # fmt: skip
        policy = make_policy(config, layers, 2 * shape.page_bytes)
        plane = torch.zeros(pages * PAGE, 1, 16, dtype=torch.bfloat16)  # one for all layers
        slots = budget * batch + batch + budget
        self.engine = DeviceStepEngine(
            shape=shape, policy=policy, budget_pages=budget, max_batch=batch, max_pages=each,
            host=HostPages(shape, [plane] * layers, [plane] * layers),
            digests=DigestPool(shape, pages, "cpu", config.digest),
            resident=ResidentCache(shape, slots, "cpu"),
            table=ResidencyTable(layers, pages, slots, policy.residency.half_life_steps),
            projectors=[], ring=NoRing(layers), life=lambda: 1, hidden_size=16,
            hidden_dtype=shape.dtype,
        )  # fmt: skip
        self.engine.recall.close()
        self.engine.recall._side = Here()
        self.pages = 1 + np.arange(batch * each, dtype=np.int32).reshape(batch, each)
        self.slots = np.arange(batch)
        self.lengths = options.context + 7 * np.arange(batch, dtype=np.int64) % PAGE
        self.engine.digests.valid[self.pages[:, : options.context // PAGE]] = True
        self.drift = Drift(layers, batch, each, budget, rho)
        self._make_resident()

    def _make_resident(self) -> None:
        """What the rows select at first, as if they had decoded for long."""
        table = self.engine.table
        for layer, chosen in enumerate(self._chosen().numpy()):
            table.uses.touch(np.array([layer]), chosen[None], 0, np.zeros(len(chosen), bool))
            table.commit(table.reserve(layer, chosen), 0)

    def step(self, begin: Callable[..., None]) -> float:
        """One step; how long its boundary took, in us."""
        self.lengths += 1
        used = -(-int(self.lengths.max()) // PAGE)
        table = self.pages[:, :used].copy()  # as of a request table
        start_ns = time.perf_counter_ns()
        begin(table, self.slots, self.lengths)
        took_us = (time.perf_counter_ns() - start_ns) / 1e3
        self._select()
        self.drift.advance()
        return took_us

    def _chosen(self) -> torch.Tensor:
        """``[L, B, k]`` pages."""
        columns = self.drift.columns(torch.from_numpy((self.lengths - 1) // PAGE))
        return torch.from_numpy(self.pages).expand(len(columns), -1, -1).gather(2, columns)

    def _select(self) -> None:
        """What the graph would leave behind."""
        pages = self._chosen()
        slots = self.engine._slot_of.gather(1, pages.flatten(1).long()).view_as(pages)
        missing = torch.where(slots < 0, pages, -1).sort(2, descending=True).values
        results = self.engine._results
        results.pages[:], results.missing[:] = pages, missing


def timed_parts(engine: DeviceStepEngine) -> dict[str, list[float]]:
    """Makes the engine's parts append the time that they take, in us."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}

    def wrap(owner: Any, name: str, into: list[float]) -> None:
        plain = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start_ns = time.perf_counter_ns()
            found = plain(*args)
            into.append((time.perf_counter_ns() - start_ns) / 1e3)
            return found

        setattr(owner, name, timed)

    for part, path in PARTS.items():
        *owners, name = path.split(".")
        owner: Any = engine
        for attribute in owners:
            owner = getattr(owner, attribute)
        wrap(owner, name, times[part])
    return times


def measure(options: argparse.Namespace, batch: int, rho: float) -> dict[str, Any]:
    bench = Bench(options, batch, rho)
    engine, counters = bench.engine, bench.engine.counters
    with nothing_launched() as calls:
        for _ in range(options.warm_up):
            bench.step(engine.begin_step)
        before = counters.recalled_pages, counters.cpu_pages, counters.budget_pages
        calls.clear()
        parts = timed_parts(engine)
        times = [bench.step(engine.begin_step) for _ in range(options.steps)]
    recalled, missing, budget = (
        now - then
        for now, then in zip(
            (counters.recalled_pages, counters.cpu_pages, counters.budget_pages),
            before,
            strict=True,
        )
    )
    engine.table.check()
    mean_us = statistics.mean(times)
    means = {part: round(sum(found) / len(times), 1) for part, found in parts.items()}
    return rows.summary(times) | {
        "mean_us": round(mean_us, 1),
        "parts_us": means | {"rest": round(mean_us - sum(means.values()), 1)},
        "recalled": round(recalled / options.steps, 1),
        "cpu_compute_ratio": round(missing / budget, 4),
        "calls": {kind: round(n / options.steps, 1) for kind, n in sorted(calls.items())},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="JSON lines")
    parser.add_argument("--batch", type=lambda s: [int(x) for x in s.split(",")], default=[16, 64])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=24)
    parser.add_argument("--recall", choices=[m for m in RECALL_MODES if m != "profile"],
                        default="adaptive")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    options = parser.parse_args(argv)
    if options.quick:
        options.batch, options.layers, options.context, options.budget = [2], 3, 2048, 256
        options.steps, options.warm_up = 8, 4
    torch.set_num_threads(1)
    shared = rows.environment("boundary_time", ("torch", "numpy"))
    writer = rows.Writer(options.json, shared)
    rho = calibrated_rho(options.context // PAGE, options.budget // PAGE)
    for batch in options.batch:
        sizes = {"layers": options.layers, "context": options.context, "budget": options.budget,
                 "batch": batch, "recall": options.recall, "rho": round(rho, 6)}  # fmt: skip
        row = writer.add("device-engine", **sizes, **measure(options, batch, rho))
        print(
            f"batch {batch}: {row['median_us'] / 1e3:.2f} ms, mean {row['mean_us'] / 1e3:.2f} "
            f"(spread {row['spread']:.2f}), "
            f"{row['recalled']} pages recalled, ratio {row['cpu_compute_ratio']}\n"
            f"  {row['parts_us']}\n  {row['calls']}",
            flush=True,
        )
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
