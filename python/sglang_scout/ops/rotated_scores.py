"""Scores of pages by rotated digests; see `ops.rotated`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

from .. import _native
from . import triton as kernels
from .minmax import reduce_heads
from .rotated import PAGE_TOKENS, decode, rotate, value_norms


def page_masses(
    q: torch.Tensor,
    planes: torch.Tensor,
    stats: torch.Tensor,
    table: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """u[h, p] = log sum_t exp(scale R q[h] . x_t), the estimated log softmax mass of the page, and the mean of |v_t|
    under that softmax, both [B, HQ, N]."""
    (B, N), H = table.shape, planes.shape[1]
    ids = table.clamp(min=0).flatten()
    digests = planes.index_select(0, ids), stats.index_select(0, ids)
    keys = decode(*digests)  # [B * N, H, 32, D]
    norms = value_norms(digests[1]).view(B, N, H, PAGE_TOKENS)
    q = rotate(q.view(B, H, q.shape[1] // H, q.shape[2]) * scale)
    logits = torch.einsum("bhgd,bnhtd->bhgnt", q, keys.view(B, N, *keys.shape[1:]))
    means = torch.einsum("bhgnt,bnht->bhgn", logits.softmax(-1), norms)
    return logits.logsumexp(-1).flatten(1, 2), means.flatten(1, 2)


def score_rotated(
    q: Float[Tensor, "B HQ D"],
    planes: UInt8[Tensor, "P H 2 16 D//4"],
    stats: UInt8[Tensor, "P H D+112"],
    table: Int32[Tensor, "B N"],
    n_full: Int32[Tensor, " B"],
    scale: float,
) -> Float32[Tensor, "B N"]:
    """Score every full page of every request against its (predicted) query.

        u[h, p] = log sum_t exp(scale R q[h] . x_t)       the estimated log softmax mass of the page

    and u is reduced over heads as in `score_pages`, except that each token is weighted by the norm of its value: summed
    is sum_t w[h, t] |v_t|, an upper bound on what head h's output loses without the page.

    Args:
        q: after RoPE.
        planes, stats: of one layer, see `build_layer_rotated`.
        table, n_full, scale: as in `score_pages`.
    Returns:
        -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: codes as in RaBitQ (arXiv 2405.12497) and QuIP (arXiv 2307.13304); norms of values as in VATP (arXiv
        2406.12335); combining them into a page score: ours.
    """
    run = kernels.rotated_scores.score_rotated if q.is_cuda else _score_rotated_native
    return run(q, planes, stats, table, n_full, scale)


def score_rotated_reference(q, planes, stats, table, n_full, scale):
    masses, means = page_masses(q.float(), planes, stats, table, scale)
    return reduce_heads(masses, table, n_full, means)


def _scored(log_masses, out_shape, q, planes, stats, table, n_full, scale):
    out, threads = q.new_empty(out_shape, dtype=torch.float32), torch.get_num_threads()
    of_pages = planes, stats, table, n_full, scale, log_masses
    _native.score_rotated(q.float(), *of_pages, out, threads)
    return out


def _score_rotated_native(q, planes, stats, table, n_full, scale):
    return _scored(False, table.shape, q, planes, stats, table, n_full, scale)


def _of_lists(
    pages: torch.Tensor, planes: torch.Tensor, stats: torch.Tensor, lists: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With one list per KV head, view each (page, head) as a page of one head, so that a list reads its head only."""
    if lists == 1:
        return planes, stats, pages
    head = torch.arange(lists, dtype=torch.int32, device=pages.device)[:, None]
    rows = (pages.unflatten(0, (-1, lists)) * lists + head).flatten(0, 1)
    return planes.flatten(0, 1).unsqueeze(1), stats.flatten(0, 1).unsqueeze(1), rows


def mass_change_rotated(
    q: Float[Tensor, "B HQ D"],
    q_ahead: Float[Tensor, "B HQ D"],
    planes: UInt8[Tensor, "P H 2 16 D//4"],
    stats: UInt8[Tensor, "P H D+112"],
    pages: Int32[Tensor, "BC N"],
    n_pages: Int32[Tensor, " BC"],
    scale: float,
) -> Float32[Tensor, "B HQ"]:
    """Estimate the difference in log softmax mass of the given pages between two queries: m(q) - m(q_ahead) with

        m[h](q) = log sum_p sum_t exp(scale R q[h] . x_t[p])

    Args:
        planes, stats, scale: as in `score_rotated`.
        pages, n_pages: the first n_pages of each row; negative ones are padding. With H lists per request, row
            b * H + h belongs to KV head h of request b.
    Returns:
        0 for a row without pages, and where the difference is not finite.
    """
    run = kernels.rotated_scores.mass_change_rotated if q.is_cuda else _mass_change_rotated_native
    return run(q, q_ahead, planes, stats, pages, n_pages, scale)


def mass_change_rotated_reference(q, q_ahead, planes, stats, pages, n_pages, scale):
    lists = len(pages) // len(q) if len(q) else 1
    planes, stats, rows = _of_lists(pages, planes, stats, lists)
    size = len(rows), q.shape[1] // lists, q.shape[2]
    void = (torch.arange(rows.shape[1], device=rows.device) >= n_pages[:, None]) | (rows < 0)
    real, ahead = (
        page_masses(x.float().view(size), planes, stats, rows, scale)[0]
        .masked_fill_(void[:, None], -torch.inf)
        .logsumexp(-1)
        for x in (q, q_ahead)
    )
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])


def _mass_change_rotated_native(q, q_ahead, planes, stats, pages, n_pages, scale):
    lists = len(pages) // len(q) if len(q) else 1
    planes, stats, rows = _of_lists(pages, planes, stats, lists)
    size = len(rows), q.shape[1] // lists, q.shape[2]
    of_pages = planes, stats, rows, n_pages, scale
    real, ahead = (_scored(True, size[:2], x.view(size), *of_pages) for x in (q, q_ahead))
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])
