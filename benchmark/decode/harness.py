"""A decode worker without SGLang: a model with random weights around the step engine.

Real are engine, ring, attention process, pinned host pages, digests, selection, recall, and the matrix products of
every layer at the model's sizes. Not real are the weights and hence the queries: as random weights do not show
realistic drift of the important pages, queries come from a separate generator (`QueryDrift`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from benchmark.decode.model import PAGE, DummyModel, ModelSize, QueryDrift, Requests
from benchmark.device import captured, times_us
from benchmark.mapped import wait_mapped
from sglang_scout.core.config import DEFAULT_DIGEST, OffloadConfig
from sglang_scout.core.flags import parse_config
from sglang_scout.engine.device import lock_memory
from sglang_scout.engine.digests import KINDS, DigestPool
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.stores import HostPages, ModelShape, Parts, Sizes
from sglang_scout.policy import Context, make_policy, policies
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient, WorkerConfig

SPIN_US = 20_000
PIECE_BYTES = 2**28  # divides the chunks of lock_memory


def _say(locked_bytes: int) -> None:
    if locked_bytes >= 2**32:  # what takes seconds
        print(f"{locked_bytes / 2**30:.0f} GiB of host pages are locked", flush=True)


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """On a CUDA device, any host synchronization in this block raises RuntimeError.

    torch detects its own syncs: reading a value, copying to memory that is not pinned, synchronizing a
    stream or device through torch. On the CPU device this is a no-op.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Store:
    """Host pages of random keys and values in a pinned arena, with an attention process on it. Any number of engines
    may use it, one after the other: those that share ``digests`` do not compute them again.

    Args:
        pages: of the host, including page 0, which is padding.
        batch: most requests in a step.
    """

    def __init__(
        self,
        size: ModelSize,
        *,
        pages: int,
        batch: int,
        budget_pages: int,
        dtype: torch.dtype,
        device: str,
        cpus: list[int],
        fp8: torch.dtype | None = None,
    ) -> None:
        self.size, self.device = size, device
        L, H, HQ, D = size.layers, size.kv_heads, size.q_heads, size.head_dim
        self.shape = ModelShape(L, HQ, H, D, PAGE, dtype, D**-0.5, fp8=fp8)
        kv_dtype = self.shape.kv_dtype
        name, q_dtype = (str(x).removeprefix("torch.") for x in (kv_dtype, dtype))
        scale = self.shape.scale
        self.arena = Arena.create(
            ArenaSpec(L, pages, PAGE, H, HQ, D, name, scale, batch, budget_pages, q_dtype=q_dtype)
        )
        # Locked first, which also allocates it, by many threads: copies into it then run at the link's rate.
        self._unlock = (
            lock_memory(self.arena.address, self.arena.nbytes, _say) if device == "cuda" else None
        )
        self._fill(kv_dtype, torch.Generator(device).manual_seed(2))
        planes = (self.arena.k_pages, self.arena.v_pages)
        k, v = (
            [torch.from_numpy(plane(layer)).view(kv_dtype).flatten(0, 1) for layer in range(L)]
            for plane in planes
        )
        self.host = HostPages(self.shape, k, v)
        config = WorkerConfig(spin_us=SPIN_US, ready_timeout_s=120.0, populate=device == "cuda")
        self.worker = WorkerClient(self.arena, cpus, config=config)
        self.worker.serve_device()
        self.ring = GraphTransport(
            self.arena,
            lambda: self.worker.device_epoch,
            timeout_us=10_000_000,
            device=device,
            split=self.worker.split,
        )
        self.worker.start()
        self.steps = 0  # across all engines: step numbers of a ring must increase

    def _fill(self, dtype: torch.dtype, source: torch.Generator) -> None:
        """Noise in all pages, in pieces: a copy by the driver must not span two locked chunks."""
        begin = self.arena.layout.kv_offset
        ends = [*range(PIECE_BYTES, self.arena.nbytes, PIECE_BYTES), self.arena.nbytes]
        for end in (end for end in ends if end > begin):
            piece = torch.from_numpy(self.arena.bytes_at(begin, end - begin)).view(dtype)
            noise = torch.randn(
                piece.shape, generator=source, device=self.device, dtype=self.shape.dtype
            )
            piece.copy_(noise.to(dtype))
            begin = end

    @functools.cached_property
    def digests(self) -> DigestPool:
        """The digests of all pages, built from the host pages at first use."""
        pages = self.arena.spec.num_pages
        pool = DigestPool(self.shape, pages, self.device, SelectionRule(KINDS[DEFAULT_DIGEST]))
        pool.build(np.arange(pages, dtype=np.int64), self.host)
        return pool

    def wait_mapped(self, max_s: float) -> float:
        """Wait until the attention process has mapped the arena's pages; returns the mapped share."""
        of_pages = self.arena.nbytes - self.arena.layout.kv_offset
        return wait_mapped(self.worker.snapshot().pid, of_pages, max_s)

    def close(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.worker.stop()
        if self._unlock is not None:
            self._unlock()
        self.arena.close()


class Harness:
    """One engine on a store, with requests that decode indefinitely.

    Args:
        settings: of ``--kv-offload-config``.
        slots: resident pages per layer, in addition to tails and in-flight copies; None: the budget of all
            rows, as in the paper.
        digests: of the store's pages, already built; None: the engine builds them in its first step.
        mode: "graph" captures the layers once and replays them; "verify" checks every layer; with "strict" a step fails
            if it makes the host synchronize. Layers that run without a graph may not do so with "graph" either.
    """

    def __init__(
        self,
        store: Store,
        model: DummyModel,
        drift: QueryDrift,
        requests: Requests,
        *,
        settings: str = "{}",
        slots: int | None = None,
        digests: DigestPool | None = None,
        mode: Literal["graph", "verify", "strict"] = "graph",
    ) -> None:
        self.store, self.model, self.drift, batch = store, model, drift, requests.batch
        anything: Any = contextlib.nullcontext
        self._guard = anything if mode == "verify" else partial(no_waiting, store.device)
        self._before = self._guard if mode == "strict" else anything
        self.config: OffloadConfig = parse_config(
            policy="scout",
            policies=policies(),
            budget_tokens=requests.budget_tokens,
            config=settings,
        )
        shape, pages = store.shape, store.arena.spec.num_pages
        budget = self.config.budget_pages
        slots = (slots or budget * batch) + batch + budget
        policy = make_policy(Context(self.config, shape.num_layers, 2 * shape.page_bytes))
        if digests is not None:
            rule = dataclasses.replace(policy.rule, digest=KINDS[digests.kind])
            policy = dataclasses.replace(policy, rule=rule)
        held = digests or DigestPool(shape, pages, store.device, policy.rule)
        store.ring.pause()
        store.ring.errors()  # discard those of another engine
        self.engine = StepEngine(
            Parts(policy, shape, Sizes(budget, slots, batch, requests.max_pages), store.host, held),
            [self._projector(layer) for layer in range(shape.num_layers)],
            store.ring,
            mode == "verify",
        )
        self.engine._step = store.steps  # the ring's slots alternate across engines
        self._admit(requests, has_digests=digests is not None)
        source = torch.Generator(store.device).manual_seed(3)
        x = torch.randn(batch, model.size.hidden, generator=source, device=store.device)
        self.x = x.to(shape.dtype)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=store.device)
        self.out = torch.empty_like(self.x)
        # Captured before the first step, when rows are empty and nothing is posted.
        self._graph = captured(self._layers) if mode == "graph" else None

    def _admit(self, requests: Requests, has_digests: bool) -> None:
        """All requests arrive; pages that have digests are no new ones."""
        self.pages = requests.pages(self.store.arena.spec.num_pages)
        # Pages fill at different steps, as with requests that arrived at different times.
        self.lengths = requests.context + 5 * np.arange(requests.batch, dtype=np.int64) % PAGE
        of_context = requests.context // PAGE
        new = self.pages[:, of_context if has_digests else 0 :]
        self.engine.pages.allocate_pages(new.flatten().astype(np.int64))
        for row in range(requests.batch):
            self.engine.requests.admit(row, row, 0)
        self.engine.pages.arrived(np.unique(self.pages[:, :of_context]))

    def _projector(self, layer: int) -> SimpleNamespace:
        def finish(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            # Pay for the matrix product, but use the generator's query.
            return (self.drift.q[layer] + 0.0 * self.model.project_q(layer, x)).to(x.dtype)

        return SimpleNamespace(start=self.model.normed, finish=finish, weight_bytes=0)

    def _layers(self) -> None:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.engine.attend(layer, (self.drift.q[layer] + 0.0 * q).to(q.dtype), k, v)

        def before(layer: int, x: torch.Tensor) -> None:
            self.engine.layer_input(layer, x, None, self.positions)

        self.out.copy_(self.model.forward(self.x, before, attend))

    def step(self) -> None:
        """One decode step of all requests, without synchronization."""
        self.lengths += 1
        used = -(-int(self.lengths.max()) // PAGE)
        with self._before():
            self.engine.begin_step(self.pages[:, :used], np.arange(len(self.pages)), self.lengths)
        self.store.steps += 1
        if self._graph is not None and self.engine.can_replay:
            self._graph.replay()
        else:
            with self._guard():
                self._layers()
        self.drift.advance()

    def timed(self, count: int) -> tuple[list[float], dict[str, Any]]:
        """Times of steps, and what was counted meanwhile."""
        counters = self.engine.parts.counters
        before = counters.cpu_pages, counters.budget_pages, counters.gpu_wait_us
        taken = times_us(self.step, count)
        after = counters.cpu_pages, counters.budget_pages, counters.gpu_wait_us
        pages, budget, waited = (now - then for now, then in zip(after, before, strict=True))
        return taken, {
            "cpu_compute_ratio": round(pages / max(budget, 1), 4),
            "wait_share": round(waited / max(sum(taken), 1), 4),
        }

    def close(self) -> None:
        self.engine.close()
