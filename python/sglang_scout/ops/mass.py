"""Change in the softmax mass of missing pages between two queries, estimated from rotated digests."""

from __future__ import annotations

import torch

from . import native, triton
from .op import Call, op
from .rotated import (
    DIGESTS,
    NATIVE_DIMS,
    TOLERANCES,
    Coordinates,
    native_reduced,
    page_masses,
    valid_digests,
)
from .score import REDUCTIONS


def _valid_lists(call: Call) -> str:
    lists, heads = call.sizes["lists"], call.sizes["H"]
    if lists > 1 and call["coordinates"] is not None:
        return f"pages has {lists} lists per request, expected 1 with coordinates"
    if lists not in (1, heads):
        return f"pages has {lists} lists per request, expected 1 or H={heads}"
    return valid_digests(call)


def _of_lists(
    pages: torch.Tensor, planes: torch.Tensor, stats: torch.Tensor, lists: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With one list per KV head, view each (page, head) as a page of one head, so that a list reads its head only."""
    if lists == 1:
        return planes, stats, pages
    head = torch.arange(lists, dtype=torch.int32, device=pages.device)[:, None]
    rows = (pages.unflatten(0, (-1, lists)) * lists + head).flatten(0, 1)
    return planes.flatten(0, 1).unsqueeze(1), stats.flatten(0, 1).unsqueeze(1), rows


@op(
    _valid_lists,
    **DIGESTS,
    q="B H*G D query",
    q_ahead="B H*G D query",
    pages="B*lists N int32",
    n_pages="B*lists int32",
    tolerances=TOLERANCES,
)
def mass_change_rotated(
    q: torch.Tensor,
    q_ahead: torch.Tensor,
    planes: torch.Tensor,
    stats: torch.Tensor,
    pages: torch.Tensor,
    n_pages: torch.Tensor,
    scale: float,
    coordinates: Coordinates | None = None,
) -> torch.Tensor:
    """Estimate the difference in log softmax mass of the given pages between two queries.

        m[h](q) = log sum_p sum_t exp(scale R' q[h] . x_t[p]),  m(q) - m(q_ahead)

    Args:
        q, q_ahead: [B, HQ, D] any float dtype, the same for both.
        planes, stats, scale, coordinates: as in `score_rotated`.
        pages, n_pages: [B*C, N] and [B*C] int32, the first n_pages of each row; negative ones are padding. C is 1, or
            H: then row b * H + h belongs to KV head h of request b.
    Returns:
        [B, HQ] float32; 0 for a row without pages, and where the difference is not finite.
    Source: ours.
    """
    lists = len(pages) // len(q) if len(q) else 1
    planes, stats, rows = _of_lists(pages, planes, stats, lists)
    size = len(rows), q.shape[1] // lists, q.shape[2]
    void = (torch.arange(rows.shape[1], device=rows.device) >= n_pages[:, None]) | (rows < 0)
    real, ahead = (
        page_masses(x.float().view(size), planes, stats, rows, scale, coordinates)[0]
        .masked_fill_(void[:, None], -torch.inf)
        .logsumexp(-1)
        for x in (q, q_ahead)
    )
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])


@native.implements(mass_change_rotated, sizes=NATIVE_DIMS)
def _native_mass_change(q, q_ahead, planes, stats, pages, n_pages, scale, coordinates):
    lists = len(pages) // len(q) if len(q) else 1
    planes, stats, rows = _of_lists(pages, planes, stats, lists)
    size = len(rows), q.shape[1] // lists, q.shape[2]
    real, ahead = (
        native_reduced(x, planes, stats, rows, n_pages, scale, len(REDUCTIONS), x.new_empty(x.shape[:2]), coordinates)
        for x in (x.float().view(size) for x in (q, q_ahead))
    )  # fmt: skip
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])


triton.implements(mass_change_rotated, "mass", sizes={"D": triton.HEAD_DIMS})
