"""What the parts of a step engine share."""

from __future__ import annotations

import torch

from sglang_scout.engine.counters import Counters
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.policy import Policy
from sglang_scout.engine.stores import HostPages, ModelShape, Ranks, ResidentCache, Sizes
from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.residency import ResidencyTable


class Parts:
    """The stores of one rank, and who decides, counts and records.

    Args:
        shape: sizes of the model on this rank.
        host: pages that the attention process maps too; the device can access them.
        digests: of the host pages, on the device of the steps.
        ranks: those that share a layer's heads; None: all heads are here.

    Attributes:
        device: of the steps.
        resident, table: the resident cache, and which page is in which slot of it.
    Raises:
        ValueError: sizes or digests that do not fit the policy.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        sizes: Sizes,
        host: HostPages,
        digests: DigestPool,
        tracer: Tracer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        rule = policy.rule
        forced = min(rule.sink_pages + rule.recent_pages, sizes.max_pages - 1)
        if sizes.num_slots < min(sizes.max_batch * (forced + 1), host.num_pages):
            raise ValueError(
                f"resident cache of {sizes.num_slots} slots cannot hold the sink, recent and tail "
                f"pages of {sizes.max_batch} requests ({forced + 1} each)"
            )
        if digests.kind != rule.digest.name:
            raise ValueError(
                f"the digests are {digests.kind}, the policy scores {rule.digest.name}"
            )
        self.policy, self.shape, self.sizes = policy, shape, policy.step_sizes(sizes)
        self.host, self.digests, self.ranks = host, digests, ranks
        self.tracer = tracer or Tracer(None, 0)
        self.counters = Counters(shape.num_layers)
        self.resident = ResidentCache(shape, sizes.num_slots, digests.device)
        self.device: torch.device = self.resident.k.device  # with its index
        self.table = ResidencyTable(shape.num_layers, host.num_pages, sizes.num_slots)
