"""Digest layouts: two parts ``[L, P, H, bytes]`` per page, whose bytes depend on the kind.

A kind's name is a value of the policy's digest. The parts are transferred with K and V from the prefill server.
Shapes: L layers, P pages, n of them, S tokens a page, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_scout.core.forecast import PageWeights
from sglang_scout.core.page_bytes import MARK_BYTES
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.embed import build_layer_means, build_layer_pilots, score_embeddings
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.mass import mass_change_rotated
from sglang_scout.ops.rotated import (
    build_layer_rotated,
    planes_shape,
    score_rotated,
)
from sglang_scout.ops.score import score_pages

_UNSET = 0x7FC0
"""Sentinel: a NaN in bfloat16, and in any kind two bytes that hardly any page has in both marks."""


@dataclass(frozen=True)
class DigestKind:
    """How digests are built and scored.

    Attributes:
        build: as :func:`build_layer_digests`; with ``trained`` W_k behind its arguments.
        score: as :func:`score_pages`, of the parts of one layer; of kinds ``per_head`` see :func:`score_heads`.
        mass_change: as :func:`mass_change_rotated`; None where scores are bounds.
        view: the parts as both of them expect, from bytes, the model's dtype and D.
        per_head: each KV head selects pages with one query vector.
        takes_digits: ``score`` takes ``digits``, :func:`query_digits` of the query.
        trained: built with W_k of a pilot file (``core/forecast.py``), and scored with W_q q.
    """

    build: Callable[..., None]
    score: Callable[..., torch.Tensor]
    mass_change: Callable[..., torch.Tensor] | None
    view: Callable[[torch.Tensor, torch.dtype, int], torch.Tensor]
    per_head: bool = False
    trained: bool = False
    takes_digits: bool = False


def _bounds(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    return part.view(dtype)


def _rotated(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    bits, left = divmod(part.shape[-1], 4 * head_dim)
    return part if left else part.unflatten(-1, planes_shape(bits, head_dim))


def _embeddings(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    is_mark = part.shape[-1] == MARK_BYTES
    return part if is_mark else part.view(dtype).unsqueeze(-2)


def _two_means(part: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    is_mark = part.shape[-1] == MARK_BYTES
    return part if is_mark else part.view(dtype).unflatten(-1, (2, head_dim))


def _and_mark(build: Callable[..., None]) -> Callable[..., None]:
    """``build`` of embeddings, then the marks that they were written."""

    def both(
        source: LayerPages,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        marks: torch.Tensor,
        rows: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> None:
        build(source, ids, embeddings, *weights, rows)
        marks.index_fill_(1, ids, 0)

    return both


def _build_marks(
    source: LayerPages,
    ids: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """For policies without page selection."""
    for marks in (first, second):
        marks.index_fill_(1, ids, 0)


def _score_nothing(*args: object) -> torch.Tensor:
    raise NotImplementedError("pages without digests cannot be scored")


KINDS = {
    "none": DigestKind(_build_marks, _score_nothing, None, lambda part, dtype, head_dim: part),
    "minmax": DigestKind(build_layer_digests, score_pages, None, _bounds),
    "mean16": DigestKind(
        _and_mark(build_layer_means), score_embeddings, None, _two_means, per_head=True
    ),
    "pilot": DigestKind(
        _and_mark(build_layer_pilots),
        score_embeddings,
        None,
        _embeddings,
        per_head=True,
        trained=True,
    ),
} | {
    f"rotated-{bits}": DigestKind(
        build_layer_rotated, score_rotated, mass_change_rotated, _rotated, takes_digits=True
    )
    for bits in (1, 2)
}


def trained_arrays(
    kind: DigestKind, weights: PageWeights | None, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """W_k and W_q on ``device`` for a trained kind, nothing for others.

    Raises:
        ValueError: weights are missing.
    """
    if not kind.trained:
        return ()
    if weights is None:
        raise ValueError("this kind of digest is trained: it needs the weights of a pilot_file")
    return tuple(torch.tensor(weights.arrays[name], device=device) for name in ("w_k", "w_q"))


def score_heads(
    query: torch.Tensor,
    embeddings: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    w_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B * H, N]`` scores per KV head, row b * H + h; see :func:`score_embeddings`.

    Args:
        query: ``[B, H, D]``, one vector per KV head; with ``w_q`` ``[H, r, G * D]`` the real queries ``[B, HQ, D]``.
    """
    query = query.reshape(len(table), embeddings.shape[1], -1)
    if w_q is not None:
        query = torch.einsum("bhx,hrx->bhr", query.float(), w_q)
    return score_embeddings(query.flatten(0, 1).contiguous(), embeddings, table, n_full)


def _marks(parts: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """``[L, P]`` int16 each: the first word of a page's digest and the last one."""
    first, second = (part.view(torch.int16) for part in parts)
    return [first[:, :, 0, 0], second[:, :, -1, -1]]


def unset(parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> None:
    """Mark rows ``ids`` of all layers as not written."""
    for mark in _marks(parts):
        # Not an assignment, which would copy the number from host memory and synchronize the stream.
        mark.index_fill_(1, ids, _UNSET)


def is_set(parts: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """``[n]`` bool: pages whose rows of all layers were written since :func:`unset`.

    A real page has the mark's word with probability 1/65,536; its digest is then rebuilt.
    """
    corners = torch.stack([mark[:, ids] for mark in _marks(parts)])
    return ~(corners == _UNSET).any(0).any(0)
