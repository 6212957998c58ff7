"""What a page's digest holds: two parts ``[L, P, H, bytes]``, whose bytes differ from kind to kind.

A kind's name is a choice of the digest axis. The parts go with K and V from the prefill server.
Shapes: L layers, P pages, n of them, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.rotated import (
    build_layer_rotated,
    log_mass_rotated,
    planes_shape,
    score_rotated,
)
from sglang_scout.ops.score import score_pages

_UNSET = 0x7FC0
"""A NaN in bfloat16, and for any kind two bytes that hardly any page has in both places."""


@dataclass(frozen=True)
class DigestKind:
    """How digests are built and scored.

    Attributes:
        build: as :func:`build_layer_digests`.
        score: as :func:`score_pages`, of the parts of one layer.
        log_mass: as :func:`log_mass_rotated`; None where scores are bounds.
        view: the parts as both of them take these, from bytes, the dtype of K and D.
    """

    build: Callable[..., None]
    score: Callable[..., torch.Tensor]
    log_mass: Callable[..., torch.Tensor] | None
    view: Callable[[torch.Tensor, torch.dtype, int], torch.Tensor]


def _bounds(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    return part.view(dtype)


def _rotated(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    bits, left = divmod(part.shape[-1], 4 * head_dim)
    return part if left else part.unflatten(-1, planes_shape(bits, head_dim))


KINDS = {
    "minmax": DigestKind(build_layer_digests, score_pages, None, _bounds),
} | {
    f"rotated-{bits}": DigestKind(build_layer_rotated, score_rotated, log_mass_rotated, _rotated)
    for bits in (1, 2)
}


def _marks(parts: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    first, second = (part.view(torch.int16) for part in parts)
    return [first[:, :, 0, 0], second[:, :, -1, -1]]


def unset(parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment: it would copy the number from host memory and wait for the stream.
        mark.index_fill_(1, ids, _UNSET)


def is_set(parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: pages whose rows of all layers were written since :func:`unset`.

    A mark is the word of a real page once in 65,536; such a page is built again.
    """
    corners = torch.stack([mark[:, ids] for mark in _marks(parts)])
    return ~(corners == _UNSET).any(0).any(0)
