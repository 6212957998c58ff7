"""Assembles a step engine: for the server, for benchmarks and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.attention import attention_by
from sglang_scout.engine.device_clock import DeviceClock
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.stores import HostPages, ModelShape, Sizes
from sglang_scout.engine.tensor_parallel import Ranks
from sglang_scout.engine.trace import Tracer
from sglang_scout.engine.transport import Fetch, GraphTransport, HostTransport, Transport
from sglang_scout.ops.doorbell import DeviceRing
from sglang_scout.ops.predict import QueryProjector
from sglang_scout.policy.base import Policy
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient


def device_ring(
    arena: Arena,
    worker: WorkerClient,
    device: torch.device | str,
    timeout_s: float,
    faults: torch.Tensor | None = None,
    rank: int = 0,
) -> DeviceRing:
    """The ring, driven by a device's stream; ``worker``, not yet started, will serve it.

    Args:
        timeout_s: how long a step waits for CPU attention.
        faults, rank: as of :class:`DeviceRing`.
    """
    worker.serve_device()
    return DeviceRing(
        arena.address,
        arena.layout(),
        arena.spec,
        parts=worker.parts,
        split=worker.split,
        timeout_us=int(timeout_s * 1e6),
        device=device,
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
        shape: sizes of the model on this rank.
        host: pages that the attention process maps too; the device can access them.
        projectors: per layer, computes its query from a layer input.
        worker: computes missing pages, called from the host or from the device's stream.
        digests: of the host pages; None: created here.
        ranks: those that share a layer's heads; None: all heads are here.
    Raises:
        ValueError: sizes that do not fit the policy, or an ``attend_kernel`` that cannot run.
    """
    device = torch.device(device)
    forced = min(policy.rule.sink_pages + policy.rule.recent_pages, sizes.max_pages - 1)
    if sizes.num_slots < min(sizes.max_batch * (forced + 1), host.num_pages):
        raise ValueError(
            f"resident cache of {sizes.num_slots} slots cannot hold the sink, recent and tail "
            f"pages of {sizes.max_batch} requests ({forced + 1} each)"
        )
    attend = attention_by(config.attend_kernel, policy, shape, sizes, device)
    digests = digests or DigestPool(shape, host.num_pages, device, policy.rule.kind)
    if digests.kind != policy.rule.kind:
        raise ValueError(f"the digests are {digests.kind}, the policy scores {policy.rule.kind}")
    tracer = tracer or Tracer(None, 0)
    if policy.feedback is not None:
        sizes = replace(sizes, budget_pages=0, lists=1)  # nothing is selected
    transport: Transport
    if policy.route == "fetch":
        transport = Fetch(
            host, shape, sizes.max_batch, sizes.lists, sizes.budget_pages, device, attend
        )
    elif isinstance(worker, GraphTransport):
        transport = worker
        if tracer.active:  # the host only launches; the timeline needs device timestamps
            worker.stamps = DeviceClock(tracer, shape.num_layers, device)
    else:
        transport = HostTransport(worker, shape, sizes.max_batch, tracer)
    # Ranks may differ in residency, and would then replay different graphs.
    is_alone = ranks is None
    if config.grain == "head":
        ranks = None  # each KV head selects for itself, even if a rank has only one
    return StepEngine(
        policy,
        shape,
        sizes,
        host,
        digests,
        projectors,
        transport,
        attend,
        device=device,
        tracer=tracer,
        verify=config.verify,
        ranks=ranks,
        has_dense_steps=is_alone and policy.feedback is None,
    )
