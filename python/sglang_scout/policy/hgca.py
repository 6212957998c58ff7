"""HGCA (Deng et al.): dense attention to a recent window on the device, to salient older tokens on the CPU.

Each KV head keeps its own tokens when they leave the window, by the moving average of their attention weights, and the
CPU attends to them in the same layer with the real query. ``--kv-offload-budget`` is the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.core.errors import ConfigError
from sglang_scout.ops.salience import decay_mass, salient_bits, select_salient
from sglang_scout.policy.base import (
    Context,
    Policy,
    QuerySource,
    Residency,
    SelectionRule,
    WindowView,
)

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


@dataclass
class SalientTokens:
    """Keeps tokens with more than beta / window of their head's attention when they leave the window.

    Args:
        window_tokens, window_pages: tokens on the device, and pages of a window.
        alpha, beta: of Algorithm 1; the paper gives no alpha, and 1 for beta.
        cap_tokens: None: none, as in the paper. A head at its cap doubles its beta (ours).
    """

    window_tokens: int
    window_pages: int
    alpha: float
    beta: float
    cap_tokens: int | None

    def allocate(
        self, layers: int, requests: int, heads: int, page_tokens: int, device: torch.device
    ) -> None:
        places = layers, requests, self.window_pages, heads, page_tokens
        self._maw = torch.zeros(places, device=device)
        self._betas = torch.full((layers, requests, heads), self.beta)
        self._threshold = torch.zeros_like(self._betas, device=device)
        self._threshold.fill_(self.beta / self.window_tokens)

    def joins(self, state: int) -> None:
        self._betas[:, state] = self.beta
        self._threshold[:, state] = self.beta / self.window_tokens

    def raise_threshold(self, state: int, heads: npt.NDArray[np.bool_]) -> None:
        betas = self._betas[:, state]
        doubled = torch.where(betas > 0, 2 * betas, 1.0)
        betas.copy_(torch.where(torch.from_numpy(heads), doubled, betas))
        self._threshold[:, state] = (betas / self.window_tokens).to(self._threshold)

    def attended(
        self, layer: int, q: torch.Tensor, lse: torch.Tensor, view: WindowView, scale: float
    ) -> None:
        decay_mass(q, lse, *view, self._maw[layer], self.alpha, scale)

    def leaving(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return salient_bits(self._maw, states, places, self._threshold)

    def select(
        self,
        state: int,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return select_salient(q, k, pages, self._betas[layer, state], scale)
