"""Elementwise minimum and maximum of a page's keys after RoPE, and scores by them: an upper bound of q.k over the page
(Quest, section 3.3)."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from .. import _native
from . import triton as kernels
from .pages import LayerPages, source_rows


def build_layer_digests(
    source: LayerPages,
    ids: Int64[Tensor, " n"],
    kmin: Float[Tensor, "L P H D"],
    kmax: Float[Tensor, "L P H D"],
    rows: Int64[Tensor, "L n"] | None = None,
) -> None:
    """Write m_d = min_t K[t, d] and M_d = max_t K[t, d] over the tokens t of the full pages ``ids``, in every layer;
    all other rows are unchanged. One launch.

    Args:
        kmin, kmax: dtype of K, or a wider one if K is fp8; mutated.
        rows: the row of each page's K in each layer of ``source``; None: the row of its id.
    Source: Quest section 3.3, ScoutAttention section 3.2.
    """
    if kmin.is_cuda:
        run = kernels.pages.build_layer_digests
    else:  # C++ reads host pages, whose rows are their ids
        run = _build_layer_digests_native if rows is None else build_layer_digests_reference
    run(source, ids, kmin, kmax, rows)


def build_layer_digests_reference(source, ids, kmin, kmax, rows=None):
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        low, high = torch.aminmax(k.to(kmin.dtype), dim=1)
        kmin[layer].index_copy_(0, ids, low.to(kmin.device))
        kmax[layer].index_copy_(0, ids, high.to(kmax.device))


@functools.cache
def _values(dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """[256] the values of fp8 bytes, with the NaN of e4m3 as 480; not used for other dtypes."""
    if dtype.itemsize > 1:
        return torch.zeros(256, dtype=to)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    if dtype == torch.float8_e4m3fn:
        values[127], values[255] = 480.0, -480.0
    return values.to(to)


def _build_layer_digests_native(source, ids, kmin, kmax, rows=None):
    _native.digest_layers(source.k, ids, _values(source.k[0].dtype, kmin.dtype), kmin, kmax)


def reduce_heads(
    u: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    worth: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """[B, N] scores from ``u`` [B, HQ, N], whose shares are weighted by ``worth``; see `score_pages`."""
    columns = torch.arange(table.shape[1], device=table.device)
    void = (columns >= n_full[:, None]) | (table < 0)  # [B, N]
    u = u.masked_fill(void[:, None], -torch.inf)
    score = (torch.softmax(u, dim=-1) * worth).sum(dim=1)
    return score.masked_fill_(void, -torch.inf)  # also replaces the NaN of rows without pages


def score_pages(
    q: Float[Tensor, "B HQ D"],
    kmin: Float[Tensor, "P H D"],
    kmax: Float[Tensor, "P H D"],
    table: Int32[Tensor, "B N"],
    n_full: Int32[Tensor, " B"],
    scale: float,
) -> Float32[Tensor, "B N"]:
    """Score every full page of every request against its (predicted) query.

    Quest: u = sum_d max(q_d m_d, q_d M_d) = max(q, 0) . M + min(q, 0) . m, as m_d <= M_d: two matrix products.
    Pages are selected for all heads together, so a page's score is the sum of every head's softmax over the request's
    pages.

    Args:
        q: after RoPE; with 16-bit digests its values must be representable in their dtype, as the model's query is (a
            kernel rounds it to that).
        table: page ids below P; negative ones are padding.
        n_full: only the first n_full[b] columns of row b are candidates.
    Returns:
        -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: Quest section 3.3 (bound), ScoutAttention Algorithm 1 line 5 (use); the sum over heads: ours.
    """
    run = kernels.score.score_pages if q.is_cuda else _score_pages_native
    return run(q, kmin, kmax, table, n_full, scale)


def score_pages_reference(q, kmin, kmax, table, n_full, scale):
    (B, N), (H, D) = table.shape, kmin.shape[1:]
    ids = table.clamp(min=0).flatten()
    low, high = (x.index_select(0, ids).view(B, N, H, D).float() for x in (kmin, kmax))
    q = q.float().view(B, H, q.shape[1] // H, D) * scale
    u = torch.einsum("bhgd,bnhd->bhgn", q.clamp(min=0), high)
    u += torch.einsum("bhgd,bnhd->bhgn", q.clamp(max=0), low)
    return reduce_heads(u.flatten(1, 2), table, n_full)


def _score_pages_native(q, kmin, kmax, table, n_full, scale):
    out = q.new_empty(table.shape, dtype=torch.float32)
    threads = torch.get_num_threads()
    _native.score_pages(q.float(), kmin, kmax, table, n_full, scale, out, threads)
    return out
