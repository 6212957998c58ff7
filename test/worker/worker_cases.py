"""Requests of random queries and pages, a numpy oracle, and ways to stop a process and to wait for something."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sglang_scout.worker.arena import Arena, ArenaSpec

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # fp32 sums in another order than the oracle's float64
SIZES = {"num_layers": 3, "num_pages": 40, "page_size": 4, "max_batch": 4, "max_pages": 8}
HEADS = {"num_kv_heads": 2, "num_q_heads": 4, "head_dim": 16, "kv_dtype": "float32", "scale": 0.25}


def small_spec(**changes: object) -> ArenaSpec:
    return ArenaSpec(**SIZES | HEADS | changes)


def to_bits(values: np.ndarray, spec: ArenaSpec) -> np.ndarray:
    if spec.kv_dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)  # truncated to bfloat16
    return values.astype(np.float16).view(np.uint16) if spec.kv_dtype == "float16" else values


def from_bits(bits: np.ndarray, spec: ArenaSpec) -> np.ndarray:
    if spec.kv_dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if spec.kv_dtype == "float16" else bits


def oracle(arena: Arena, layer: int, q, pages, n_pages) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale * q k^T) v over the listed pages in float64: out [B,HQ,D], lse [B,HQ]."""
    s = arena.spec
    group = s.num_q_heads // s.num_kv_heads
    out, lse = np.zeros(q.shape, np.float64), np.full(q.shape[:2], -np.inf)
    for b, head in np.ndindex(*lse.shape):
        row = b * s.lists + head // s.row_heads
        ids = [p for p in pages[row, : n_pages[row]] if p >= 0]
        if not ids:
            continue
        k, v = (
            np.concatenate([tokens_of(arena, layer, which, p, head // group) for p in ids])
            for which in (0, 1)
        )
        logits = k @ q[b, head].astype(np.float64) * s.scale
        top = logits.max()
        weights = np.exp(logits - top)
        out[b, head] = weights @ v / weights.sum()
        lse[b, head] = top + np.log(weights.sum())
    return out, lse


def tokens_of(arena: Arena, layer: int, which: int, page: int, kv_head: int) -> np.ndarray:
    """K (0) or V (1) of the tokens that an id stands for: a host page's, or the first of a context page, [n, D]."""
    s = arena.spec
    kept, last = divmod(page - s.num_pages, s.page_size)
    if kept >= 0:
        return arena.context(layer, which)[kept, : last + 1].astype(float)
    plane = (arena.k_pages, arena.v_pages)[which](layer)
    return from_bits(plane[page, :, kv_head], s).astype(float)


def close(found, expected, **tolerance: float) -> None:
    """out and lse are the oracle's."""
    np.testing.assert_allclose(found[0], expected[0], **TOLERANCE | tolerance)
    np.testing.assert_allclose(found[1], expected[1], **TOLERANCE)


def make_request(spec: ArenaSpec, batch: int, seed: int, full: bool = False):
    """Random q, pages and n_pages of `batch` requests; unless full some rows are empty, some entries -1.

    If there are context pages, every second list is of these, of which the last may be partly filled.
    """
    rng = np.random.default_rng(seed)
    rows = batch * spec.lists
    q = rng.standard_normal((batch, spec.num_q_heads, spec.head_dim), np.float32)
    if spec.q_dtype == "bfloat16":
        q = from_bits(to_bits(q, spec), spec)
    pages = rng.integers(full - 1, spec.num_pages, (rows, spec.max_pages), np.int32)
    n_pages = rng.integers(spec.max_pages * full, spec.max_pages + 1, rows, np.int32)
    if spec.context_pages:
        size, of_context = spec.page_size, pages[::2]
        of_context[:] = rng.integers(0, spec.context_pages, of_context.shape) * size + size - 1
        last = np.maximum(n_pages[::2] - 1, 0)
        of_context[np.arange(len(last)), last] -= rng.integers(0, size, len(last), np.int32)
        of_context += spec.num_pages
    return q, pages, n_pages


def buffers(arena: Arena, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """out and lse for a number of requests, filled with NaN."""
    s = arena.spec
    out = np.full((batch, s.num_q_heads, s.head_dim), np.nan, np.float32)
    return out, np.full((batch, s.num_q_heads), np.nan, np.float32)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Waits for a condition; fails with its text after a deadline."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def freeze(pid: int) -> None:
    """Sends SIGSTOP and waits until it has taken effect in every thread."""
    os.kill(pid, signal.SIGSTOP)
    stats = [thread / "stat" for thread in Path(f"/proc/{pid}/task").iterdir()]
    until(lambda: all(") T " in stat.read_text() for stat in stats), f"stop of {pid}")
