"""A decode worker without SGLang: a model of random weights around the device's step engine.

What is real: engine, ring, worker process, page-locked host pages, digests, selection, recall, and the matrix
products of every layer at the model's sizes. What is not: the weights, and with them the queries. Random weights say
nothing about how the important pages drift, so queries follow a generator of its own (`QueryDrift`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from mapped import wait_mapped
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.parse_config import parse_config
from sglang_scout.engine.device import lock_memory
from sglang_scout.engine.device_step import DeviceStepEngine
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape, ResidentCache
from sglang_scout.ops.doorbell import DeviceRing
from sglang_scout.ops.predict import rms_norm
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.presets import POLICY_NAMES, make_policy
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient, WorkerConfig

PAGE = 32
SPIN_US = 20_000
_EPS = 1e-6


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """On a CUDA device, whatever makes the host wait for it in this block raises RuntimeError.

    torch notices its own waits: a value that is asked for, a copy to memory that is not page-locked, a
    stream or device that is synchronised through torch. On the CPU device nothing is looked at.
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


class ModelSize(NamedTuple):
    """Sizes of a dense model with grouped-query attention."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


SIZES = {
    "qwen3-8b": ModelSize(36, 4096, 32, 8, 128, 12288),
    "qwen3-14b": ModelSize(40, 5120, 40, 8, 128, 17408),
    "tiny": ModelSize(3, 64, 4, 2, 32, 96),
}


class DummyModel:
    """Decoder layers of random weights; ``attend`` stands for what the weights do not decide."""

    def __init__(self, size: ModelSize, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.size = size
        source = torch.Generator(device).manual_seed(seed)
        width = size.q_heads * size.head_dim

        def weights(rows: int, columns: int) -> torch.Tensor:
            shape = (rows, columns)
            made = torch.randn(shape, generator=source, device=device, dtype=torch.float32)
            return made.mul_(columns**-0.5).to(dtype)

        qkv = width + 2 * size.kv_heads * size.head_dim
        self.norm = torch.ones(size.hidden, dtype=dtype, device=device)
        self.layers = [
            (
                weights(qkv, size.hidden),
                weights(size.hidden, width),
                weights(2 * size.intermediate, size.hidden),
                weights(size.hidden, size.intermediate),
            )
            for _ in range(size.layers)
        ]

    def project_q(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """``[B, HQ, D]`` query of ``layer`` from any layer input."""
        width = self.size.q_heads * self.size.head_dim
        q = rms_norm(x, self.norm, _EPS) @ self.layers[layer][0][:width].T
        return q.view(len(x), self.size.q_heads, self.size.head_dim)

    def forward(self, x: torch.Tensor, before_layer: Any, attend: Any) -> torch.Tensor:
        """``before_layer(layer, x)``; ``attend(layer, q, k, v)`` gives ``[B, HQ, D]``."""
        size = self.size
        heads = [size.q_heads, size.kv_heads, size.kv_heads]
        for layer, (w_qkv, w_out, w_up, w_down) in enumerate(self.layers):
            before_layer(layer, x)
            qkv = rms_norm(x, self.norm, _EPS) @ w_qkv.T
            q, k, v = qkv.view(len(x), -1, size.head_dim).split(heads, dim=1)
            out = attend(layer, q, k, v).to(x.dtype)
            x = x + out.flatten(1) @ w_out.T
            gate, up = (rms_norm(x, self.norm, _EPS) @ w_up.T).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ w_down.T
        return x


class QueryDrift:
    """Queries of all layers and rows: q(t+1) = rho q(t) + sqrt(1 - rho^2) noise, seeded.

    With rho = 1 the important pages never change, with 0 they are new in every step. Attributes:
        q: ``[L, B, HQ, D]`` fp32, of the step that comes; stays where it is.
    """

    def __init__(self, size: ModelSize, batch: int, rho: float, device: str, seed: int = 1) -> None:
        self._source = torch.Generator(device).manual_seed(seed)
        self._device, self.rho = device, rho
        shape = (size.layers, batch, size.q_heads, size.head_dim)
        self.q = torch.randn(shape, generator=self._source, device=device)

    def advance(self) -> None:
        noise = torch.randn(self.q.shape, generator=self._source, device=self._device)
        self.q.mul_(self.rho).add_(noise, alpha=(1 - self.rho**2) ** 0.5)


class Store:
    """Host pages of random keys and values in a page-locked arena, with a worker process on it."""

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
        seed: int = 2,
    ) -> None:
        self.size, self.device, self.batch = size, device, batch
        self.shape = ModelShape(
            size.layers, size.q_heads, size.kv_heads, size.head_dim, PAGE, dtype,
            size.head_dim**-0.5,
        )  # fmt: skip
        self.arena = Arena.create(
            ArenaSpec(
                size.layers, pages, PAGE, size.kv_heads, size.q_heads, size.head_dim,
                str(dtype).removeprefix("torch."), self.shape.scale, batch, budget_pages,
            )
        )  # fmt: skip
        planes = (self.arena.k_pages, self.arena.v_pages)
        kv = [[torch.from_numpy(plane(i)).view(dtype) for i in range(size.layers)]
              for plane in planes]  # fmt: skip
        source = torch.Generator(device).manual_seed(seed)
        for plane in (*kv[0], *kv[1]):
            for some in plane.split(4096):
                some.copy_(torch.randn(some.shape, generator=source, device=device, dtype=dtype))
        # After it is filled: a copy by the driver must not span two locked ranges.
        self._unlock = (
            lock_memory(self.arena.address, self.arena.nbytes) if device == "cuda" else None
        )
        self.host = HostPages(self.shape, *([t.flatten(0, 1) for t in half] for half in kv))
        self.worker = WorkerClient(
            self.arena,
            cpus,
            config=WorkerConfig(spin_us=SPIN_US, ready_timeout_s=120.0, populate=device == "cuda"),
        )
        self.worker.serve_device()
        self.worker.start()
        self.ring = DeviceRing(
            self.arena.address, self.arena.layout(), num_layers=size.layers, max_batch=batch,
            max_pages=budget_pages, num_q_heads=size.q_heads, head_dim=size.head_dim,
            parts=self.worker.parts, split=self.worker.split, timeout_us=10_000_000, device=device,
        )  # fmt: skip
        self.steps = 0  # over all engines: a ring's steps count up

    def wait_mapped(self, most_s: float) -> float:
        """Wait until the worker has mapped the arena's pages; the share that it has."""
        of_pages = self.arena.nbytes - self.arena.layout().kv_offset
        return wait_mapped(self.worker.snapshot().pid, of_pages, most_s)

    def close(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.worker.stop()
        if self._unlock is not None:
            self._unlock()
        self.arena.close()


class Rig:
    """One engine on a store, with requests of equal length that decode on and on.

    Args:
        context: tokens of each request at the start, or up to a page more; each gets ``room`` more pages.
        settings: of ``--kv-offload-config``.
        slots: resident pages per layer, beside tails and copies under way; None: the budget of all rows,
            as in the paper.
        graph: capture the layers once and replay them. Without it, and without ``verify``, which looks at
            every layer, a step fails if its layers make the host wait.
        strict: so does what comes before the layers.
    """

    def __init__(
        self,
        store: Store,
        model: DummyModel,
        drift: QueryDrift,
        *,
        batch: int,
        context: int,
        budget_tokens: int,
        room: int = 8,
        settings: str = "{}",
        slots: int | None = None,
        graph: bool,
        verify: bool = False,
        strict: bool = False,
    ) -> None:
        self.store, self.model, self.drift, self.batch = store, model, drift, batch
        self._guard: Any = contextlib.nullcontext if verify else partial(no_waiting, store.device)
        self._before = self._guard if strict else contextlib.nullcontext
        self.config: OffloadConfig = parse_config(
            policy="scout", policies=POLICY_NAMES, budget_tokens=budget_tokens, config=settings
        )
        shape, pages = store.shape, store.arena.spec.num_pages
        budget = self.config.budget_pages
        policy = make_policy(self.config, shape.num_layers, 2 * shape.page_bytes)
        slots = (slots or budget * batch) + batch + budget
        table = ResidencyTable(shape.num_layers, pages, slots, policy.residency.half_life_steps)
        each = -(-context // PAGE) + room
        self.engine = DeviceStepEngine(
            shape=shape, policy=policy, budget_pages=budget, max_batch=store.batch, max_pages=each,
            host=store.host, digests=DigestPool(shape, pages, store.device, self.config.digest),
            resident=ResidentCache(shape, slots, store.device), table=table,
            projectors=[self._projector(layer) for layer in range(shape.num_layers)],
            ring=store.ring, life=lambda: store.worker.device_epoch, hidden_size=model.size.hidden,
            hidden_dtype=shape.dtype, verify=verify,
        )  # fmt: skip
        self.engine._step = store.steps  # the ring's slots alternate over all engines
        self.pages = 1 + np.arange(batch * each, dtype=np.int32).reshape(batch, each)
        if self.pages.max() >= pages:
            raise ValueError(f"{batch} requests of {each} pages; the store has {pages}")
        # Pages fill at different steps, as those of requests that did not come together.
        self.lengths = context + 5 * np.arange(batch, dtype=np.int64) % PAGE
        self.engine.boundary.allocate_pages(self.pages.flatten().astype(np.int64))
        full = [row[: length // PAGE] for row, length in zip(self.pages, self.lengths, strict=True)]
        self.engine.boundary.admit(range(batch), np.concatenate(full))
        source = torch.Generator(store.device).manual_seed(3)
        self.x = torch.randn(batch, model.size.hidden, generator=source, device=store.device).to(
            shape.dtype
        )
        self.positions = torch.zeros(batch, dtype=torch.int64, device=store.device)
        self.out = torch.empty_like(self.x)
        self._graphs: dict[bool, Any] = {}  # by whether the step is a late one
        if graph:
            self._graphs[False] = self._capture()
            with self.engine.captured_late():
                self._graphs[True] = self._capture()

    def _projector(self, layer: int) -> Any:
        def project(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            # The product costs what it costs; what it says is the generator's.
            return self.drift.q[layer, : len(x)] + 0.0 * self.model.project_q(layer, x)

        return project

    def _layers(self) -> None:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.engine.attend(layer, self.drift.q[layer, : len(q)] + 0.0 * q, k, v)

        def before(layer: int, x: torch.Tensor) -> None:
            self.engine.layer_input(layer, x, self.positions)

        self.out.copy_(self.model.forward(self.x, before, attend))

    def _capture(self) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._layers()  # nothing has begun: rows are empty and nothing is posted
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()  # an earlier rig's graphs, freed in the middle of a capture, would end it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._layers()
        return graph

    def step(self) -> None:
        """One decode step of all requests; the host does not wait for it."""
        self.lengths += 1
        used = -(-int(self.lengths.max()) // PAGE)
        with self._before():
            self.engine.begin_step(self.pages[:, :used], np.arange(self.batch), self.lengths)
        self.store.steps += 1
        if self._graphs:
            self._graphs[self.engine.is_late].replay()
        else:
            with self._guard():
                self._layers()
        self.drift.advance()

    def close(self) -> None:
        self.engine.close()
