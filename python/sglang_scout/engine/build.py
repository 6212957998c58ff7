"""Assembles a step engine: for the server, for benchmarks and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.fetch import Fetch
from sglang_scout.engine.ranks import Ranks
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.stores import DigestPool, HostPages, ModelShape, ResidentCache
from sglang_scout.engine.trace import Tracer
from sglang_scout.engine.transport import GraphTransport, HostTransport, Transport
from sglang_scout.ops.doorbell import DeviceRing
from sglang_scout.ops.predict import QueryProjector
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import Policy
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient


@dataclass(frozen=True)
class Sizes:
    """What a rank's buffers are made for.

    Attributes:
        budget_pages: k, pages selected per request and layer.
        num_slots: device slots per layer.
        max_batch, max_pages: most rows in a step, and pages of a row.
    """

    budget_pages: int
    num_slots: int
    max_batch: int
    max_pages: int


def device_ring(
    arena: Arena,
    worker: WorkerClient,
    device: torch.device | str,
    timeout_s: float,
    faults: torch.Tensor | None = None,
    rank: int = 0,
) -> DeviceRing:
    """The ring as a device's stream drives it; ``worker`` serves it from now on, before it starts.

    Args:
        timeout_s: how long a step waits for the worker.
        faults, rank: as of :class:`DeviceRing`.
    """
    spec = arena.spec
    worker.serve_device()
    return DeviceRing(
        arena.address,
        arena.layout(),
        num_layers=spec.num_layers,
        max_batch=spec.max_batch,
        max_pages=spec.max_pages,
        num_q_heads=spec.num_q_heads,
        head_dim=spec.head_dim,
        parts=worker.parts,
        split=worker.split,
        timeout_us=int(timeout_s * 1e6),
        device=device,
        num_nodes=spec.num_nodes,
        faults=faults,
        rank=rank,
    )


def build_engine(
    config: OffloadConfig,
    policy: Policy,
    shape: ModelShape,
    sizes: Sizes,
    host: HostPages,
    projectors: Sequence[QueryProjector],
    worker: WorkerClient | GraphTransport,
    *,
    device: torch.device | str = "cpu",
    digests: DigestPool | None = None,
    tracer: Tracer | None = None,
    ranks: Ranks | None = None,
) -> StepEngine:
    """A step engine and its stores on ``device``.

    Args:
        host: pages that the worker sees as well; memory that the device can use.
        worker: who computes missing pages, on the host's thread or on the device's stream.
        digests: of the host pages; None: made here.
    Raises:
        ValueError: sizes that do not fit the policy.
    """
    tracer = tracer or Tracer(None, 0)
    return StepEngine(
        shape=shape,
        policy=policy,
        budget_pages=sizes.budget_pages,
        max_batch=sizes.max_batch,
        max_pages=sizes.max_pages,
        host=host,
        digests=digests or DigestPool(shape, host.num_pages, device, policy.digest.kind),
        resident=ResidentCache(shape, sizes.num_slots, device),
        table=ResidencyTable(shape.num_layers, host.num_pages, sizes.num_slots),
        projectors=projectors,
        transport=_transport(policy, shape, sizes, host, worker, torch.device(device), tracer),
        tracer=tracer,
        verify=config.verify,
        ranks=ranks,
    )


def _transport(
    policy: Policy,
    shape: ModelShape,
    sizes: Sizes,
    host: HostPages,
    worker: WorkerClient | GraphTransport,
    device: torch.device,
    tracer: Tracer,
) -> Transport:
    if policy.route == "fetch":
        return Fetch(host, shape, sizes.max_batch, sizes.budget_pages, device)
    if policy.route == "drop":
        return Transport(torch.zeros(shape.num_layers, dtype=torch.int64))
    if isinstance(worker, GraphTransport):
        return worker
    return HostTransport(worker, shape, sizes.max_batch, tracer)
