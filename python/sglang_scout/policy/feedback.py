"""Feedback: attention statistics of the tokens of the device's recent window."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class WindowView(NamedTuple):
    """The window of a layer, B rows: full pages, oldest first, and the page being filled. On the device, int32 but
    ``k``.

    Attributes:
        k: ``[slots, S, H, D]``.
        pages, n_pages: ``[B, N]``, the first ``[B]`` of each row are its window's.
        slot_of: ``[P]`` slot of each page.
        tail_slot, tail_len: ``[B]`` slot of the page being filled, tokens in it.
        first_at: ``[B]`` index of the window's oldest page in a ring buffer of a window's pages.
        state: ``[B]`` each request's row of the policy's stores, -1 without one.
        fresh: ``[B]`` not 0 in a request's first step.
    """

    k: torch.Tensor
    pages: torch.Tensor
    n_pages: torch.Tensor
    slot_of: torch.Tensor
    tail_slot: torch.Tensor
    tail_len: torch.Tensor
    first_at: torch.Tensor
    state: torch.Tensor
    fresh: torch.Tensor


class Feedback(Protocol):
    """Statistics of the device's attention over the window, which decide the tokens that are kept for the CPU.

    With feedback nothing is selected: the device attends to a window and the CPU to kept older tokens.
    """

    cap_tokens: int | None
    """Maximum kept tokens per request, layer and head."""

    def allocate(
        self, layers: int, requests: int, heads: int, page_tokens: int, device: torch.device
    ) -> None:
        """Allocate the stores, a row per request."""

    def joins(self, state: int) -> None:
        """A request takes a row."""

    def attended(
        self, layer: int, q: torch.Tensor, lse: torch.Tensor, view: WindowView, scale: float
    ) -> None:
        """The device attended to a window."""

    def leaving(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """``[L, n, H]`` bits of the tokens kept of pages that leave their windows."""

    def select(
        self,
        state: int,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads and tokens kept of host pages of a request that joined; on a thread concurrent with the steps."""

    def raise_threshold(self, state: int, heads: npt.NDArray[np.bool_]) -> None:
        """``heads`` ``[L, H]`` kept more tokens than there is room for."""
