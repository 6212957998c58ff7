"""HGCA (Deng et al.): dense attention to a recent window on the device, to salient older tokens on the CPU.

Each KV head keeps its own tokens when they leave the window, by the moving average of their attention weights, and the
CPU attends to them in the same layer with the real query. ``--kv-offload-budget`` is the window.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_scout.core.errors import ConfigError
from sglang_scout.policy.base import Context, Policy, QuerySource, Residency, SelectionRule
from sglang_scout.policy.salient_tokens import SalientTokens

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


def make(context: Context) -> Policy:
    config = context.config
    recent_pages = config.budget_pages - 1 - config.sink_pages  # minus the page being filled
    if recent_pages < 1:
        raise ConfigError(
            f"--kv-offload-budget {config.budget_tokens}: leaves no full page for the window; raise it to at least "
            f"{(2 + config.sink_pages) * config.page_size_tokens}"
        )
    return Policy(
        name="hgca",
        rule=SelectionRule(config.digest, sink_pages=config.sink_pages, recent_pages=recent_pages),
        query=QuerySource(is_ahead=False),
        route="cpu",
        residency=Residency(),
        feedback=SalientTokens(
            window_tokens=config.budget_tokens,
            window_pages=recent_pages + 1,
            alpha=config.hgca_alpha,
            beta=torch.tensor(config.hgca_beta).item(),  # infinite if too large for float32
            cap_tokens=config.context_cap_tokens,
        ),
    )
