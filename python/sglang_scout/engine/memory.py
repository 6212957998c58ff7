"""How much memory the stores take, decided once at start and refused if it is not there."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.pools import ModelShape

HEADROOM_BYTES = 256 * 2**20
"""What the ring, the step's buffers and the interpreter may still need."""


@dataclass(frozen=True)
class MemoryPlan:
    """Counts and bytes of the three stores.

    Attributes:
        num_pages: P, host pages including the padding page.
        budget_pages: k, at most the pages of one context.
        num_slots: device slots per layer: resident pages, tails, and room for recalls under way.
    """

    num_pages: int
    budget_pages: int
    num_slots: int
    host_bytes: int
    digest_bytes: int
    resident_bytes: int

    @property
    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """(what, count, bytes) for a table."""
        return (
            ("host pages", self.num_pages, self.host_bytes),
            ("digests", self.num_pages, self.digest_bytes),
            ("resident slots", self.num_slots, self.resident_bytes),
        )


def plan_memory(
    config: OffloadConfig,
    shape: ModelShape,
    *,
    num_pages: int,
    max_batch: int,
    context_tokens: int,
) -> MemoryPlan:
    """Sizes of the stores for ``num_pages`` host pages and at most ``max_batch`` requests."""
    size = shape.page_size
    budget_pages = min(config.budget_pages, -(-context_tokens // size))
    budget_pages = max(budget_pages, config.sink_pages + config.recent_pages)
    resident = (config.resident_tokens or config.budget_tokens * max_batch) // size
    resident = max(resident, (config.sink_pages + config.recent_pages) * max_batch)
    # With a slot for every page nothing is ever missing; more would stay empty.
    num_slots = min(resident + max_batch + budget_pages, num_pages)
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    return MemoryPlan(
        num_pages=num_pages,
        budget_pages=budget_pages,
        num_slots=num_slots,
        host_bytes=num_pages * page_bytes,
        digest_bytes=num_pages * page_bytes // size,
        resident_bytes=num_slots * page_bytes,
    )


def check_memory(plan: MemoryPlan, config: OffloadConfig, available_bytes: int) -> None:
    """Refuse a plan for the CPU device, where all stores share one memory, that does not fit.

    Raises:
        ConfigError: naming the parts and the flags that size them.
    """
    needed = plan.host_bytes + plan.digest_bytes + plan.resident_bytes + HEADROOM_BYTES
    if needed <= available_bytes:
        return
    parts = ", ".join(f"{what} {size / 2**30:.2f} GiB" for what, _, size in plan.rows)
    raise ConfigError(
        f"--kv-offload {config.policy}: needs {needed / 2**30:.2f} GiB ({parts}), but "
        f"{available_bytes / 2**30:.2f} GiB of memory are available; lower --kv-offload-host-gb "
        f"({'not given' if config.host_gb is None else format(config.host_gb, 'g')}), "
        f"--kv-offload-budget ({config.budget_tokens}), --max-running-requests, or resident_tokens "
        f"({config.resident_tokens}) in --kv-offload-config"
    )
