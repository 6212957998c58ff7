"""What the parts of a step engine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_scout.engine.counters import Counters
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.stores import HostPages, ModelShape, ResidentCache, Sizes
from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.residency import ResidencyTable
from sglang_scout.policy.base import Policy


@dataclass(frozen=True)
class Parts:
    """``table`` says which page is in which slot of ``resident``."""

    policy: Policy
    shape: ModelShape
    sizes: Sizes
    host: HostPages
    digests: DigestPool
    resident: ResidentCache
    table: ResidencyTable
    counters: Counters
    tracer: Tracer

    @property
    def device(self) -> torch.device:
        """Of the steps."""
        return self.resident.k.device
