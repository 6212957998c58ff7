"""Small arenas with random pages, a numpy oracle, and a check that nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from sglang_scout.worker.arena import Arena, ArenaSpec

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def cpu() -> int:
    return CPUS[-1]


@pytest.fixture
def make_spec() -> Callable[..., ArenaSpec]:
    def make(**changes: object) -> ArenaSpec:
        sizes: dict[str, object] = {
            "num_layers": 3, "num_pages": 40, "page_size": 4, "num_kv_heads": 2,
            "num_q_heads": 4, "head_dim": 16, "kv_dtype": "float32", "scale": 0.25,
            "max_batch": 4, "max_pages": 8,
        }  # fmt: skip
        return ArenaSpec(**(sizes | changes))

    return make


@pytest.fixture
def make_arena(make_spec) -> Iterator[Callable[..., Arena]]:
    arenas: list[Arena] = []

    def make(**changes: object) -> Arena:
        arena = Arena.create(make_spec(**changes))
        arenas.append(arena)
        rng = np.random.default_rng(7)
        for layer in range(arena.spec.num_layers):
            for plane in (arena.k_pages(layer), arena.v_pages(layer)):
                plane[:] = to_bits(rng.standard_normal(plane.shape, np.float32), arena.spec)
        return arena

    yield make
    for arena in arenas:
        arena.close()


def to_bits(values: np.ndarray, spec: ArenaSpec) -> np.ndarray:
    if spec.kv_dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)  # truncation: still a bfloat16
    return values.astype(np.float16).view(np.uint16) if spec.kv_dtype == "float16" else values


def from_bits(bits: np.ndarray, spec: ArenaSpec) -> np.ndarray:
    if spec.kv_dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if spec.kv_dtype == "float16" else bits


@pytest.fixture
def oracle() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """softmax(scale * q k^T) v over the listed pages in float64: out [B,HQ,D], lse [B,HQ]."""

    def run(arena: Arena, layer: int, q, pages, n_pages) -> tuple[np.ndarray, np.ndarray]:
        s = arena.spec
        group = s.num_q_heads // s.num_kv_heads
        out = np.zeros(q.shape, np.float64)
        lse = np.full(q.shape[:2], -np.inf)
        for b in range(len(q)):
            ids = [p for p in pages[b, : n_pages[b]] if p >= 0]
            if not ids:
                continue
            k, v = (
                from_bits(plane[ids], s).astype(np.float64).reshape(-1, s.num_kv_heads, s.head_dim)
                for plane in (arena.k_pages(layer), arena.v_pages(layer))
            )
            for head in range(s.num_q_heads):
                logits = k[:, head // group] @ q[b, head].astype(np.float64) * s.scale
                if s.logit_cap:
                    logits = s.logit_cap * np.tanh(logits / s.logit_cap)
                top = logits.max()
                weights = np.exp(logits - top)
                out[b, head] = weights @ v[:, head // group] / weights.sum()
                lse[b, head] = top + np.log(weights.sum())
        return out, lse

    return run


@pytest.fixture
def make_request() -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Random q, pages and n_pages of `rows` rows; some rows empty, some entries -1."""

    def make(spec: ArenaSpec, rows: int, seed: int, full: bool = False):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((rows, spec.num_q_heads, spec.head_dim), np.float32)
        low = 0 if full else -1
        pages = rng.integers(low, spec.num_pages, (rows, spec.max_pages), np.int32)
        n_pages = rng.integers(0, spec.max_pages + 1, rows, np.int32)
        if full:
            n_pages[:] = spec.max_pages
        return q, pages, n_pages

    return make


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition; fails with its text after a deadline."""

    def wait(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> float:
        begin_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begin_s < timeout_s, f"not within {timeout_s} s: {what}"
            time.sleep(0.005)
        return time.monotonic() - begin_s

    return wait


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """True if a process is dead (an orphan may stay a zombie where nobody collects it)."""
    return is_gone


@pytest.fixture
def sockets_in() -> Callable[[Path], list[str]]:
    return lambda folder: sorted(p.name for p in folder.glob("sglang-scout-*"))
