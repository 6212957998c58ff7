"""Tensor parallelism: the heads of a layer are sharded over ranks, each with its own engine.

A page is selected for all heads of a layer together, so the ranks all-reduce their heads' scores and select from the
same numbers. Residency is local to each rank: it decides where its heads' part is computed, not which.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import torch

from sglang_scout.policy.base import SelectionRule


class Ranks(Protocol):
    """The other ranks. Every rank makes the same calls in the same order."""

    def combine(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Element-wise ``how``, "sum" or "max", of every rank's ``x``: the same bits on every rank.

        ``x`` may be written into.
        """


class SharedChoice:
    """Makes one selection over all ranks' heads.

    Args:
        ranks: of this layer's heads. Each query head is on one rank, even if a KV head is on several, so that no score
            counts twice.
        rule: how scores are computed.
    """

    def __init__(self, ranks: Ranks, rule: SelectionRule) -> None:
        self._ranks = ranks
        # Softmax shares are per head over its pages, so they can be summed over any heads.
        self._how = "sum" if rule.head_reduce == "mass" else "max"

    def scores(self, own: torch.Tensor) -> torch.Tensor:
        """``[B, N]`` fp32 scores over all heads, from this rank's; -inf stays -inf."""
        return self._ranks.combine(own, self._how)

    def is_same(self, pages: torch.Tensor) -> bool:
        """Whether all ranks have selected these ``pages`` (any shape); for checks."""
        found = zlib.crc32(pages.cpu().numpy().tobytes())
        both = torch.tensor([found, -found], device=pages.device)
        largest, least = self._ranks.combine(both, "max").tolist()
        return bool(largest == -least)
