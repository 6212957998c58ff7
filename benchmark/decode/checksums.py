"""Cost of ``page_checksums`` on a CPU: attention over missing pages and CPU-device steps, with and without.

    OMP_NUM_THREADS=1 python -m benchmark.decode.checksums --json docs/results/checksums.jsonl      a minute

There is no attention process: this one computes what it would, with the same code. Times are CPU time, as the machine
may be shared. Runs with and without alternate on the same pages: without, the checksum words are 0, like those of pages
that may still change. No page is damaged, which is verified at the end.

Rows (format: rows.py):
    check         pages verified by one thread, in shuffled order; `gb_per_s`
    attend        the answer to a record of 16 rows, Qwen3-8B's heads, bf16; `pages` per row, `gb_per_s`
    attend-sealed the same, with pages verified first
    step          a step of harness.py with the sizes of cpu_step.py, including the boundary; `missing_share`
    step-sealed   the same, with pages verified before they are attended to or copied
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmark import rows
from benchmark.decode import cpu_step
from benchmark.decode.harness import PAGE, Store
from benchmark.decode.model import SIZES, DummyModel
from sglang_scout.worker.checksums import PageChecksums

HEADS = SIZES["qwen3-8b"]._replace(layers=1)
POOL_PAGES, BATCH, WIDTHS = 8192, 16, (8, 32)
ROUNDS, WARM_UP = 40, 4
STEP = {"batch": 4, "context": 4096, "budget": 1024}


class Words:
    """Seals ``pages`` of a store, and can hide the checksums from readers."""

    def __init__(self, store: Store, pages: np.ndarray) -> None:
        self.checksums = PageChecksums(store.arena)
        self.checksums.seal(pages)
        self._kept = self.checksums.words.copy()

    def show(self, is_sealed: bool) -> None:
        self.checksums.words[:] = self._kept if is_sealed else 0


def in_turns(words: Words, call: Callable[[], object]) -> list[list[float]]:
    """Microseconds of ``call`` without and with checksums."""
    taken: list[list[float]] = [[], []]
    for _ in range(WARM_UP + ROUNDS):
        for sealed, samples in enumerate(taken):
            words.show(bool(sealed))
            begin = time.process_time_ns()
            call()
            samples.append((time.process_time_ns() - begin) / 1e3)
    return [samples[WARM_UP:] for samples in taken]


def attention(writer: rows.Writer, cpu: int) -> None:
    store = Store(
        HEADS, pages=POOL_PAGES, batch=BATCH, budget_pages=WIDTHS[-1], dtype=torch.bfloat16,
        device="cpu", cpus=[cpu], from_device=False, checksums=True,
    )  # fmt: skip
    store.worker.stop()
    words, source = Words(store, np.arange(1, POOL_PAGES)), np.random.default_rng(1)
    page_bytes = 2 * store.shape.page_bytes
    q = source.standard_normal((BATCH, HEADS.q_heads, HEADS.head_dim), np.float32)
    out, lse, step = np.empty_like(q), np.empty(q.shape[:2], np.float32), 0

    def shuffled(count: int) -> np.ndarray:
        return source.permutation(POOL_PAGES - 1)[:count] + 1

    words.checksums._threads = 1
    samples = []
    for _ in range(ROUNDS):
        pages = shuffled(BATCH * WIDTHS[-1])
        begin = time.process_time_ns()
        words.checksums.check(np.zeros(len(pages)), pages)
        samples.append((time.process_time_ns() - begin) / 1e3)
    add(writer, "check", samples, BATCH * WIDTHS[-1] * page_bytes)

    def attend(width: int) -> None:
        nonlocal step
        step += 1
        pages = shuffled(BATCH * width).astype(np.int32).reshape(BATCH, width)
        counts = np.full(BATCH, width, np.int32)
        reply = store.worker.wait(store.worker.post(0, step, q, pages, counts), out, lse)
        assert reply.fallback_pages == pages.size

    for width in WIDTHS:
        both = in_turns(words, partial(attend, width))
        for name, samples in zip(("attend", "attend-sealed"), both, strict=True):
            add(writer, name, samples, BATCH * width * page_bytes, pages=width)
    assert not words.checksums.failures
    store.close()


def steps(writer: rows.Writer, cpu: int) -> None:
    batch, context, budget = STEP.values()
    size = SIZES["cpu"]
    store = Store(
        size, pages=1 + batch * (context // PAGE + cpu_step.ROOM), batch=batch, budget_pages=budget // PAGE,
        dtype=torch.float32, device="cpu", cpus=[cpu], from_device=False, checksums=True,
    )  # fmt: skip
    store.worker.stop()
    model = DummyModel(size, torch.float32, "cpu")
    harness = cpu_step.harness_of(store, model, batch, context, budget)
    words = Words(store, harness.pages[:, : context // PAGE].flatten())
    counters = harness.engine.counters
    for name, samples in zip(("step", "step-sealed"), in_turns(words, harness.step), strict=True):
        share = round(counters.cpu_pages / counters.budget_pages, 4)
        add(writer, name, samples, None, missing_share=share, **STEP)
    assert not words.checksums.failures
    harness.close()
    store.close()


def add(
    writer: rows.Writer, name: str, samples: list[float], nbytes: int | None, **fields: object
) -> None:
    measured = rows.summary(samples)
    gb_per_s = nbytes and round(nbytes / measured["median_us"] / 1e3, 2)
    writer.add(name, gb_per_s=gb_per_s, **fields, **measured)
    print(name, fields, gb_per_s, "GB/s", measured["median_us"], "us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    options = parser.parse_args()
    mine, *others = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    writer = rows.Writer(options.json, rows.environment("checksums", ("torch", "sglang-scout")))
    attention(writer, (others or [mine])[0])
    steps(writer, (others or [mine])[0])
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
