"""``doctor``'s check of CPU attention: a real process on a small arena, whose result is compared with a reference."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.cli.machine_checks import Check
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient, WorkerConfig

ROWS, PAGES, ROUNDS = 4, 16, 30
TOLERANCE = 1e-4
"""Absolute, for values of order one: fp32 sums over 512 tokens in different orders."""
HEADS = {"num_kv_heads": 8, "num_q_heads": 40, "head_dim": 128, "scale": 128**-0.5}
SIZES = {"num_layers": 1, "num_pages": 65, "page_size": 32, "max_batch": ROWS, "max_pages": PAGES}
SPEC = ArenaSpec(kv_dtype="bfloat16", **SIZES, **HEADS)
"""One layer with the heads of Qwen3-14B; 8 MiB of pages."""
Floats = npt.NDArray[np.float32]


def check_worker(cpus: Sequence[int] | None) -> Check:
    """Starts a process on ``cpus`` or all, checks its result, times it, and stops it. Raises ScoutError."""
    logging.disable(logging.WARNING)  # the result says what was wrong
    cpus = cpus or sorted(os.sched_getaffinity(0))
    begin_s, config = time.monotonic(), WorkerConfig(wait_timeout_s=5.0)
    try:
        with Arena.create(SPEC) as arena, WorkerClient(arena, cpus, config=config) as client:
            ready_s = time.monotonic() - begin_s
            found, problem = compare_and_time(client, arena)
    finally:
        logging.disable(logging.NOTSET)
    text = (
        f"ready in {ready_s * 1e3:.0f} ms, control socket {found['endpoint']}; {ROWS} sequences x {PAGES} pages: "
        f"largest error {found['max_error']:.1e}, round trip {found['batch_us']:.0f} us; one page: "
        f"{found['page_us']:.0f} us{problem and f': {problem}'}"
    )
    values = {"right": not problem, "problem": problem, "ready_s": ready_s} | found
    return Check(text, problem and "please report it", values, failed=bool(problem))


def attend_plainly(
    q: Floats, k: npt.NDArray[np.uint16], v: npt.NDArray[np.uint16], pages: npt.NDArray[np.int32]
) -> tuple[Floats, Floats]:
    """Softmax attention of ``q`` ``[B, HQ, D]`` over pages ``[B, n]`` of bf16 ``[P, S, H, D]``: out and log-sum-exp."""
    group = SPEC.num_q_heads // SPEC.num_kv_heads
    pool = (np.stack([k, v])[:, pages].astype(np.uint32) << 16).view(np.float32)
    keys, values = pool.reshape(2, len(q), -1, *k.shape[2:]).repeat(group, axis=3)
    scores = np.einsum("bhd,bthd->bht", q, keys) * SPEC.scale
    lse = np.logaddexp.reduce(scores, axis=2)
    return np.einsum("bht,bthd->bhd", np.exp(scores - lse[..., None]), values), lse


def compare_and_time(client: WorkerClient, arena: Arena) -> tuple[dict[str, Any], str]:
    """What a started client's process computed, and in what median time; and what is wrong with it, or ""."""
    rng = np.random.default_rng(0)
    for plane in (arena.k_pages(0), arena.v_pages(0)):
        values = rng.standard_normal(plane.shape, dtype=np.float32)
        plane[:] = (values.view(np.uint32) >> 16).astype(np.uint16)  # bf16, rounded towards zero
    q = rng.standard_normal((ROWS, SPEC.num_q_heads, SPEC.head_dim), dtype=np.float32)
    order = rng.permutation(np.arange(1, SPEC.num_pages, dtype=np.int32))
    pages = order[: ROWS * PAGES].reshape(ROWS, PAGES).copy()
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)

    def time_us(rows: int, of_each: int) -> float:
        times, counts = [], np.full(rows, of_each, np.int32)
        for step in range(ROUNDS):
            begin_ns = time.perf_counter_ns()
            ticket = client.post(0, step, q[:rows], pages[:rows], counts)
            client.wait(ticket, out[:rows], lse[:rows])
            times.append((time.perf_counter_ns() - begin_ns) / 1e3)
        return statistics.median(times)

    page_us, batch_us = time_us(1, 1), time_us(ROWS, PAGES)
    want_out, want_lse = attend_plainly(q, arena.k_pages(0), arena.v_pages(0), pages)
    # numpy's max: Python's ignores a NaN.
    error = float(np.maximum(np.abs(out - want_out).max(), np.abs(lse - want_lse).max()))
    status, problem = client.snapshot(), ""
    if not error <= TOLERANCE:  # also true for NaN
        problem = f"the error of {error:.2e} exceeds the tolerance of {TOLERANCE:.0e}"
    elif status.fallback_pages or status.restarts:
        problem = (
            f"the CPU attention process was replaced {status.restarts} times, and {status.fallback_pages} pages were "
            f"computed without it: {status.last_error}"
        )
    found = {"rows": ROWS, "pages": PAGES, "batch_us": batch_us, "page_us": page_us}
    return found | {"max_error": error, "isa": status.isa, "endpoint": status.endpoint}, problem
