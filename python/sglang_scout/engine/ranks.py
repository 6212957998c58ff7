"""Tensor parallelism: the heads of a layer are dealt out to ranks, and each rank has an engine of its own.

A page is chosen for all heads of a layer together, so the ranks put their heads' scores together and
choose from the same numbers. Which of the chosen pages are resident is each rank's own affair: it says
where its heads' part is computed, not what of it.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import torch

from sglang_scout.policy.base import Digest


class Ranks(Protocol):
    """The other ranks. Every rank makes the same calls in the same order."""

    def combine(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Element-wise ``how``, "sum" or "max", of every rank's ``x``: the same bits on every rank.

        ``x`` may be written into.
        """


class SharedChoice:
    """Makes one choice of pages out of those of the ranks' heads.

    Args:
        ranks: of this layer's heads. Query heads are on one rank each, also where a KV head is on
            several, so that no score counts twice.
        digest: how scores are made.
    """

    def __init__(self, ranks: Ranks, digest: Digest) -> None:
        self._ranks = ranks
        # Softmax shares are of one head over its pages, so that they add up over any heads.
        self._how = "sum" if digest.head_reduce == "mass" else "max"

    def scores(self, own: torch.Tensor) -> torch.Tensor:
        """``[B, N]`` fp32 scores over all heads, from those of this rank's heads; -inf stays -inf."""
        return self._ranks.combine(own, self._how)

    def is_same(self, pages: torch.Tensor) -> bool:
        """Whether all ranks have chosen these ``pages`` (any shape); for checks."""
        found = zlib.crc32(pages.cpu().numpy().tobytes())
        both = torch.tensor([found, -found], device=pages.device)
        largest, least = self._ranks.combine(both, "max").tolist()
        return bool(largest == -least)
