"""What a page's digest holds, behind one interface: two halves, each of one buffer or more.

A kind's name is a choice of the digest axis. The halves go with K and V from the prefill server. The
minimum and maximum of keys and their signs take the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.signs import as_bits, build_layer_signs, score_signs

Half = tuple[torch.Tensor, ...]
"""Buffers ``[L, P, H, ...]``; of one layer: ``[P, H, ...]``. In the last one unset pages are marked."""

_UNSET_BITS = 0x7FC0
"""A NaN in bfloat16, and for any kind a word that hardly any page has."""


class DigestKind(Protocol):
    """Shapes: L layers, P pages, n of them, S tokens a page, H KV heads, D head size."""

    def half(
        self, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> Half:
        """Zeroed buffers for ``size`` (L, P, H, D) and K of ``dtype``; page_bytes.py counts their bytes."""

    def build(
        self,
        source: LayerPages,
        ids: torch.Tensor,
        low: Half,
        high: Half,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Write rows ``ids`` ``[n]`` of the halves, of all layers, from K ``[P, S, H, D]``, or from ``rows``
        ``[L, n]`` of K ``[R, S, H, D]``."""

    def score(
        self,
        query: torch.Tensor,
        low: Half,
        high: Half,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        """``[B, N]``, from the halves of one layer; see ``ops/score.py`` and ``ops/signs.py``."""

    def across_heads(self, head_reduce: str) -> str:
        """How the scores of two groups of heads become one: "sum" or "max"."""

    def is_set(self, low: Half, high: Half, ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` bool: pages whose rows of all layers were written since :func:`unset`, of this kind."""


def unset(low: Half, high: Half, ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for half, corner in ((low, (0, 0)), (high, (-1, -1))):
        # Not an assignment: it would copy the number from host memory and wait for the stream.
        as_bits(half[-1])[:, :, *corner].index_fill_(1, ids, _UNSET_BITS)


def _is_marked(low: Half, high: Half, ids: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: of some half and layer."""
    corners = torch.stack([as_bits(low[-1])[:, ids, 0, 0], as_bits(high[-1])[:, ids, -1, -1]])
    return (corners == _UNSET_BITS).any(0).any(0)


def _is_in_order(low: Half, high: Half, ids: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: no channel of the first layer has a lower end above its upper end."""
    return (low[0][0, ids] <= high[0][0, ids]).flatten(1).all(1)


class _InWordsOfKeys:
    """A half is one word of the size of a key element for every channel."""

    def half(
        self, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> Half:
        return (torch.zeros(size, dtype=dtype, device=device),)


class MinMax(_InWordsOfKeys):
    """Smallest and largest key of every channel (Quest)."""

    def build(
        self,
        source: LayerPages,
        ids: torch.Tensor,
        low: Half,
        high: Half,
        rows: torch.Tensor | None = None,
    ) -> None:
        build_layer_digests(source, ids, *low, *high, rows)

    def score(
        self,
        query: torch.Tensor,
        low: Half,
        high: Half,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        return score_pages(query, *low, *high, table, n_full, scale, head_reduce)

    def across_heads(self, head_reduce: str) -> str:
        # Softmax shares are of one head over its pages, so that they add up over any heads.
        return "max" if head_reduce == "max" else "sum"

    def is_set(self, low: Half, high: Half, ids: torch.Tensor) -> torch.Tensor:
        # Half of the channels of signs, which take the same buffers, are out of order.
        return _is_in_order(low, high, ids) & ~_is_marked(low, high, ids)


class Signs(_InWordsOfKeys):
    """The sign of every key element."""

    def build(
        self,
        source: LayerPages,
        ids: torch.Tensor,
        low: Half,
        high: Half,
        rows: torch.Tensor | None = None,
    ) -> None:
        build_layer_signs(source, ids, *low, *high, rows)

    def score(
        self,
        query: torch.Tensor,
        low: Half,
        high: Half,
        table: torch.Tensor,
        n_full: torch.Tensor,
        scale: float,
        head_reduce: str,
    ) -> torch.Tensor:
        return score_signs(query, *low, *high, table, n_full)

    def across_heads(self, head_reduce: str) -> str:
        return "max"

    def is_set(self, low: Half, high: Half, ids: torch.Tensor) -> torch.Tensor:
        # Bounds are in order in every channel, which words of signs are only by chance. A mark is the
        # word of a real page once in 65,536; such a page is built again.
        return ~_is_in_order(low, high, ids) & ~_is_marked(low, high, ids)


KINDS: dict[str, DigestKind] = {
    "minmax": MinMax(),
    "signs": Signs(),
}
