"""HGCA (Deng et al.): dense attention to a recent window on the device, to salient older tokens on the CPU.

Each KV head keeps its own tokens when they leave the window, by the moving average of their attention weights, and the
CPU attends to them in the same layer with the real query. ``--kv-offload-budget`` is the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.memory import ServerSize
from sglang_scout.engine.policy import Policy, QuerySource, Residency
from sglang_scout.engine.step_buffers import StepInputs
from sglang_scout.engine.stores import Parts, Sizes
from sglang_scout.engine.transport import Transport
from sglang_scout.policy import Context, selection_rule
from sglang_scout.policy.hgca.older_tokens import OlderTokens

DEFAULTS: dict[str, Any] = {
    "budget_tokens": 4096,
    "digest": "none",
    "grain": "head",
    "sink_pages": 0,
    "precompute": False,
    "context_share": 0.3,  # the most that the paper's heads keep (section 3.2.2)
    "hgca_beta": 1.0,
    "hgca_alpha": 0.1,
    "context_cap_tokens": None,
}


@dataclass(frozen=True)
class HGCA(Policy):
    """Nothing is selected: the device attends to a recent window, the CPU to older tokens that were salient in it."""

    config: OffloadConfig

    def describe_missing(self) -> str:
        return "the CPU attends to the tokens kept from outside the window"

    def selector(self, parts: Parts, transport: Transport, inputs: StepInputs) -> OlderTokens:
        return OlderTokens(parts, self.config, transport, inputs)

    def step_sizes(self, sizes: Sizes) -> Sizes:
        return replace(sizes, budget_pages=0, lists=1)

    def forced_pages(self, size: ServerSize) -> int:
        return size.budget_pages  # the window

    def posted_pages(self, size: ServerSize) -> int:
        return size.context_pages  # before its evaluation a request keeps all its tokens

    def device_bytes(self, size: ServerSize) -> int:
        """Moving averages of the window's tokens; lists and queries for the CPU."""
        shape, rows = size.shape, size.max_batch * size.shape.num_kv_heads
        queries = size.max_batch * shape.num_q_heads * shape.head_dim
        listed = size.config.budget_tokens + size.context_pages
        return 4 * shape.num_layers * (rows * listed + queries)


def make(context: Context) -> Policy:
    config = context.config
    recent_pages = config.budget_pages - 1 - config.sink_pages  # minus the page being filled
    if recent_pages < 1:
        raise ConfigError(
            f"--kv-offload-budget {config.budget_tokens}: leaves no full page for the window; raise it to at least "
            f"{(2 + config.sink_pages) * config.page_size_tokens}"
        )
    return HGCA(
        name="hgca",
        rule=selection_rule(config, recent_pages=recent_pages),
        query=QuerySource(is_ahead=False),
        route="cpu",
        residency=Residency(),
        config=config,
    )
