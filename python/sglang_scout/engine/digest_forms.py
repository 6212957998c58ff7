"""What a page's digest holds, behind one interface: two rows of the KV dtype for every KV head.

A form's name is a choice of the digest axis. Both forms have the same size, so they share the pool,
the memory plan and the transfer from the prefill server.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.signs import as_bits, build_layer_signs, score_signs

_UNSET_BITS = 0x7FC0
"""A NaN in bfloat16, and in any form a word that hardly any page has."""


class DigestForm(Protocol):
    """Shapes: P pages, n of them, S tokens a page, H KV heads, D head size."""

    def build(
        self, source: LayerPages, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> None:
        """Write rows ``ids`` ``[n]`` of ``low``, ``high`` ``[L, P, H, D]`` from K ``[P, S, H, D]``."""

    def score(
        self,
        query: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        """``[B, N]``; see ``ops/score.py`` and ``ops/signs.py``."""

    def across_heads(self, head_reduce: str) -> str:
        """How the scores of two groups of heads become one: "sum" or "max"."""

    def is_set(self, low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` bool: pages whose rows in ``low``, ``high`` ``[L, P, H, D]`` were all written since
        :func:`unset`, in this form."""


def unset(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of ``low``, ``high`` ``[L, P, H, D]`` as not written."""
    for half, corner in ((low, (0, 0)), (high, (-1, -1))):
        bits = as_bits(half)
        bits[:, ids, *corner] = _UNSET_BITS


def _is_marked(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[2, L, n]`` bool."""
    corners = torch.stack([as_bits(low)[:, ids, 0, 0], as_bits(high)[:, ids, -1, -1]])
    return corners == _UNSET_BITS


def _is_in_order(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: no channel of the first layer has a lower end above its upper end."""
    return (low[0, ids] <= high[0, ids]).flatten(1).all(1)


class MinMax:
    """Smallest and largest key of every channel (Quest)."""

    def build(
        self, source: LayerPages, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> None:
        build_layer_digests(source, ids, low, high)

    def score(
        self,
        query: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        return score_pages(query, low, high, table, n_full, scale, head_reduce)

    def across_heads(self, head_reduce: str) -> str:
        # Softmax shares are of one head over its pages, so that they add up over any heads.
        return "max" if head_reduce == "max" else "sum"

    def is_set(self, low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # Half of the channels of another form are out of order.
        return _is_in_order(low, high, ids) & ~_is_marked(low, high, ids).any(0).any(0)


class Signs:
    """The sign of every key element."""

    def build(
        self, source: LayerPages, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> None:
        build_layer_signs(source, ids, low, high)

    def score(
        self,
        query: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        return score_signs(query, low, high, table, n_full)

    def across_heads(self, head_reduce: str) -> str:
        return "max"

    def is_set(self, low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # Bounds are in order in every channel, which words of signs are only by chance. A mark is the
        # word of a real page once in 65,536; such a page is built again.
        return ~_is_in_order(low, high, ids) & ~_is_marked(low, high, ids).any(0).any(0)


FORMS: dict[str, DigestForm] = {"minmax": MinMax(), "signs": Signs()}
