"""Statistics of the device's attention over a recent window, which decide the older tokens that the CPU attends to
(Deng et al., Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.policy.hgca.salience import decay_mass, salient_bits, select_salient


@dataclass
class SalientTokens:
    """Keeps tokens with more than beta / window of their head's attention when they leave the window.

    Args:
        window_tokens, window_pages: tokens on the device, and pages of a window.
        alpha, beta: of Algorithm 1; the paper gives no alpha, and 1 for beta.
        cap_tokens: most kept tokens of a request, layer and head; None: no limit, as in the paper. A head at its cap
            doubles its beta (ours).
    """

    window_tokens: int
    window_pages: int
    alpha: float
    beta: float
    cap_tokens: int | None

    def allocate(
        self, layers: int, requests: int, heads: int, page_tokens: int, device: torch.device
    ) -> None:
        """Allocate the stores: L layers, a row per request, H KV heads."""
        places = layers, requests, self.window_pages, heads, page_tokens
        self._maw = torch.zeros(places, device=device)
        self._betas = torch.full((layers, requests, heads), self.beta)
        self._threshold = torch.zeros_like(self._betas, device=device)
        self._threshold.fill_(self.beta / self.window_tokens)

    def joins(self, row: int) -> None:
        """A request takes this row."""
        self._betas[:, row] = self.beta
        self._threshold[:, row] = self.beta / self.window_tokens

    def raise_threshold(self, row: int, heads: npt.NDArray[np.bool_]) -> None:
        """``heads`` ``[L, H]`` kept more tokens than there is room for."""
        betas = self._betas[:, row]
        doubled = torch.where(betas > 0, 2 * betas, 1.0)
        betas.copy_(torch.where(torch.from_numpy(heads), doubled, betas))
        self._threshold[:, row] = (betas / self.window_tokens).to(self._threshold)

    def attended(self, layer: int, *window: torch.Tensor, scale: float) -> None:
        """The device attended to a window; its tensors are those of :func:`decay_mass`, in its order."""
        decay_mass(*window, self._maw[layer], self.alpha, scale)

    def leaving(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """``[L, n, H]`` bits of the tokens kept of pages that leave their windows, see :func:`salient_bits`."""
        return salient_bits(self._maw, rows, places, self._threshold)

    def select(
        self,
        row: int,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads and tokens kept of host pages of a request that joined; on a thread concurrent with the steps."""
        return select_salient(q, k, pages, self._betas[layer, row], scale)
