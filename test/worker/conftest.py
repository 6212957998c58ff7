"""Small arenas with random pages, and a ring whose two sides are in the test's process."""

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ring_view import RingView
from sglang_scout import _native
from sglang_scout.worker.arena import Arena
from worker_cases import buffers, small_spec, to_bits


@pytest.fixture
def cpu() -> int:
    return max(os.sched_getaffinity(0))


@pytest.fixture
def make_arena() -> Iterator[Callable[..., Arena]]:
    with contextlib.ExitStack() as stack:

        def make(**changes: object) -> Arena:
            arena = stack.enter_context(Arena.create(small_spec(**changes)))
            rng = np.random.default_rng(7)
            for layer in range(arena.spec.num_layers):
                planes = [arena.k_pages(layer), arena.v_pages(layer)]
                for plane in (*planes, *(arena.context(layer, which) for which in (0, 1))):
                    plane[:] = to_bits(rng.standard_normal(plane.shape, np.float32), arena.spec)
            return arena

        yield make


class Ring:
    """A producer on an arena, and worker threads for the epochs that a test starts."""

    def __init__(self, arena: Arena, cpus: list[int], splits=1, nodes=(), help_after_us=50) -> None:
        self.arena, self.view = arena, RingView(arena)
        self.cpus, self.splits = cpus, splits
        self.nodes, self.help_after_us = nodes, help_after_us
        self.at = arena.address, arena.nbytes
        self.producer = _native.RingProducer(*self.at)
        self.runtime: _native.RingRuntime | None = None

    def live(self, spin_us: int = 50) -> int:
        self.die()
        epoch, settings = self.mute(), (spin_us, self.splits, self.nodes, self.help_after_us)
        self.runtime = _native.RingRuntime(*self.at, epoch, self.cpus, *settings)
        return epoch

    def mute(self) -> int:
        """From now on a worker is taken to be alive, but none answers."""
        epoch = self.producer.next_epoch()
        self.producer.set_live_epoch(epoch)
        return epoch

    def die(self) -> None:
        self.producer.set_live_epoch(0)
        if self.runtime is not None:
            self.runtime.stop()
            self.runtime = None

    def post(self, layer: int, step: int, q, pages, n_pages) -> int:
        return self.producer.post(layer, step, q, pages, n_pages, self.splits)

    def wait(self, ticket: int, layer: int, step: int, batch: int, timeout_us: int = 10_000_000):
        """out, lse, and the pages that the caller computed."""
        out, lse = buffers(self.arena, batch)
        _, fallback = self.producer.wait(ticket, layer, step, timeout_us, 50, out, lse)
        return out, lse, fallback

    def serve(self, layer: int, step: int, request, timeout_us: int = 10_000_000):
        """Posts and waits."""
        ticket = self.post(layer, step, *request)
        return self.wait(ticket, layer, step, len(request[0]), timeout_us)


@pytest.fixture
def make_ring(make_arena, cpu):
    """Of an ordinary arena unless one is given."""
    with contextlib.ExitStack() as stack:

        def make(arena: Arena | None = None, threads: int = 1, *more: object, **named) -> Ring:
            ring = Ring(arena or make_arena(), [cpu] * threads, *more, **named)
            stack.callback(ring.die)
            return ring

        yield make
