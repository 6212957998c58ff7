"""Small arenas with random pages, a numpy oracle, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from sglang_scout import _native
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


FP8_FACTOR = {"float8_e4m3fn": np.float32(256), "float8_e5m2": np.float32(1)}


def to_bits(values: np.ndarray, spec: ArenaSpec) -> np.ndarray:
    if spec.kv_dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)  # truncated to bfloat16
    if spec.kv_dtype.startswith(
        "float8"
    ):  # the upper bits of a half, for e4m3 with another exponent bias
        half = (values / FP8_FACTOR[spec.kv_dtype]).astype(np.float16).view(np.uint16)
        low = half >> 8 if spec.kv_dtype == "float8_e5m2" else half >> 7 & 0x7F
        return (low | half >> 8 & 0x80).astype(np.uint8)
    return values.astype(np.float16).view(np.uint16) if spec.kv_dtype == "float16" else values


def from_bits(bits: np.ndarray, spec: ArenaSpec) -> np.ndarray:
    if spec.kv_dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if spec.kv_dtype.startswith("float8"):
        half = bits.astype(np.uint16)
        is_e5m2 = spec.kv_dtype == "float8_e5m2"
        half = half << 8 if is_e5m2 else (half & 0x7F) << 7 | (half & 0x80) << 8
        return half.view(np.float16).astype(np.float32) * FP8_FACTOR[spec.kv_dtype]
    return bits.view(np.float16).astype(np.float32) if spec.kv_dtype == "float16" else bits


@pytest.fixture
def oracle() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """softmax(scale * q k^T) v over the listed pages in float64: out [B,HQ,D], lse [B,HQ]."""

    def run(arena: Arena, layer: int, q, pages, n_pages) -> tuple[np.ndarray, np.ndarray]:
        s = arena.spec
        group = s.num_q_heads // s.num_kv_heads
        out = np.zeros(q.shape, np.float64)
        lse = np.full(q.shape[:2], -np.inf)
        for b, head in np.ndindex(*lse.shape):
            row = b * s.lists + head // s.row_heads
            ids = [p for p in pages[row, : n_pages[row]] if p >= 0]
            if not ids:
                continue
            k, v = (
                from_bits(plane[ids], s)
                .astype(np.float64)[:, :, head // group]
                .reshape(-1, s.head_dim)
                for plane in (arena.k_pages(layer), arena.v_pages(layer))
            )
            logits = k @ q[b, head].astype(np.float64) * s.scale
            top = logits.max()
            weights = np.exp(logits - top)
            out[b, head] = weights @ v / weights.sum()
            lse[b, head] = top + np.log(weights.sum())
        return out, lse

    return run


@pytest.fixture
def make_request() -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Random q, pages and n_pages of `batch` requests; some rows empty, some entries -1."""

    def make(spec: ArenaSpec, batch: int, seed: int, full: bool = False):
        rng = np.random.default_rng(seed)
        rows = batch * spec.lists
        q = rng.standard_normal((batch, spec.num_q_heads, spec.head_dim), np.float32)
        if spec.q_dtype == "bfloat16":
            q = from_bits(to_bits(q, spec), spec)
        low = 0 if full else -1
        pages = rng.integers(low, spec.num_pages, (rows, spec.max_pages), np.int32)
        n_pages = rng.integers(0, spec.max_pages + 1, rows, np.int32)
        if full:
            n_pages[:] = spec.max_pages
        return q, pages, n_pages

    return make


@pytest.fixture
def buffers() -> Callable[[Arena, int], tuple[np.ndarray, np.ndarray]]:
    """out and lse for a number of requests, filled with NaN."""

    def make(arena: Arena, batch: int) -> tuple[np.ndarray, np.ndarray]:
        s = arena.spec
        out = np.full((batch, s.num_q_heads, s.head_dim), np.nan, np.float32)
        return out, np.full((batch, s.num_q_heads), np.nan, np.float32)

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


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """True if a process is dead (an orphan may remain a zombie if nobody reaps it)."""

    def is_gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return is_gone


@pytest.fixture
def freeze(until) -> Callable[[int], None]:
    """Sends SIGSTOP and waits until it has taken effect in every thread."""

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threads = [p / "stat" for p in Path(f"/proc/{pid}/task").iterdir()]
        until(lambda: all(_state(t) == "T" for t in threads), f"stop of {pid}")

    return stop


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


class Ring:
    """A producer on an arena, and worker threads for the epochs that a test starts."""

    def __init__(
        self, arena: Arena, cpus: list[int], parts: int, nodes: Sequence[int], help_after_us: int
    ) -> None:
        self.arena, self.cpus, self.parts = arena, cpus, parts
        self.nodes, self.help_after_us = nodes, help_after_us
        self.producer = _native.RingProducer(arena.address, arena.nbytes)
        self.runtime: _native.RingRuntime | None = None

    def live(self, spin_us: int = 50) -> int:
        self.die()
        epoch = self.producer.next_epoch()
        self.runtime = _native.RingRuntime(
            self.arena.address, self.arena.nbytes, epoch, self.cpus, spin_us, self.parts,
            self.nodes, self.help_after_us,
        )  # fmt: skip
        self.producer.set_live_epoch(epoch)
        return epoch

    def die(self) -> None:
        self.producer.set_live_epoch(0)
        if self.runtime is not None:
            self.runtime.stop()
            self.runtime = None

    def post(self, layer: int, step: int, q, pages, n_pages) -> int:
        return self.producer.post(
            layer, step, len(pages), q.ctypes.data, pages.ctypes.data, pages.shape[1],
            n_pages.ctypes.data, self.parts, q.nbytes,
        )  # fmt: skip

    def wait(self, ticket: int, layer: int, step: int, batch: int, timeout_us: int = 10_000_000):
        s = self.arena.spec
        out = np.full((batch, s.num_q_heads, s.head_dim), np.nan, np.float32)
        lse = np.full((batch, s.num_q_heads), np.nan, np.float32)
        result = self.producer.wait(
            ticket, layer, step, timeout_us, 50, out.ctypes.data, lse.ctypes.data, out.nbytes
        )
        return out, lse, result[1]


@pytest.fixture
def make_ring(cpu):
    with contextlib.ExitStack() as stack:

        def make(
            arena: Arena,
            threads: int = 1,
            parts: int = 1,
            nodes: Sequence[int] = (),
            help_after_us: int = 50,
        ) -> Ring:
            ring = Ring(arena, [cpu] * threads, parts, nodes, help_after_us)
            stack.callback(ring.die)
            return ring

        yield make
