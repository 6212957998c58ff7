"""What a page's digest holds: two halves ``[L, P, H, D]`` in the dtype of K, whatever the kind.

A kind's name is a choice of the digest axis. The halves go with K and V from the prefill server.
Shapes: L layers, P pages, n of them, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.signs import as_bits, build_layer_signs, score_signs

_UNSET_BITS = 0x7FC0
"""A NaN in bfloat16, and for any kind a word that hardly any page has."""


@dataclass(frozen=True)
class DigestKind:
    """How digests are built, scored and recognised.

    Attributes:
        build: as :func:`build_layer_digests`.
        score: as :func:`score_pages`, of the halves of one layer.
        is_ordered: whether the low half is never above the high one. Tells digests of a prefill server that is
            configured otherwise: words of signs are in order only by chance.
        adds_up: whether scores of "mass" over groups of heads add up; else the largest counts.
    """

    build: Callable[..., None]
    score: Callable[..., torch.Tensor]
    is_ordered: bool
    adds_up: bool

    def across_heads(self, head_reduce: str) -> str:
        """How the scores of two groups of heads become one: "sum" or "max"."""
        return "sum" if self.adds_up and head_reduce == "mass" else "max"

    def is_set(self, low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` bool: pages whose rows of all layers were written since :func:`unset`, in this kind.

        A mark is the word of a real page once in 65,536; such a page is built again.
        """
        in_order = (low[0, ids] <= high[0, ids]).flatten(1).all(1)
        corners = torch.stack([as_bits(low)[:, ids, 0, 0], as_bits(high)[:, ids, -1, -1]])
        is_marked = (corners == _UNSET_BITS).any(0).any(0)
        return (in_order == self.is_ordered) & ~is_marked


def unset(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for half, corner in ((low, 0), (high, -1)):
        # Not an assignment: it would copy the number from host memory and wait for the stream.
        as_bits(half)[:, :, corner, corner].index_fill_(1, ids, _UNSET_BITS)


def _score_signs(*arguments: Any) -> torch.Tensor:
    """Without the last two, scale and reduction: scores are in units of each head's deviation."""
    return score_signs(*arguments[:5])


KINDS = {
    # Softmax shares are of one head over its pages, so that they add up over any heads.
    "minmax": DigestKind(build_layer_digests, score_pages, is_ordered=True, adds_up=True),
    "signs": DigestKind(build_layer_signs, _score_signs, is_ordered=False, adds_up=False),
}
