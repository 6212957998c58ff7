"""Score pages by their digests: an upper bound of q.k over the page (Quest, section 3.3)."""

from __future__ import annotations

from typing import Annotated

import torch

from .. import _native
from . import triton
from .layers import HEAD_DIMS
from .op import Tolerance, op

_REASON = "fp32 sums of up to 256 products in another order, then exp or log"
TOLERANCES = {name: Tolerance(2e-5, 2e-5, _REASON) for name in ("float32", "bfloat16", "float16")}


def reduce_heads(
    u: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    worth: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """[B, N] scores from ``u`` [B, HQ, N] of each query head, whose shares are weighted by ``worth``; see
    `score_pages`."""
    columns = torch.arange(table.shape[1], device=table.device)
    void = (columns >= n_full[:, None]) | (table < 0)  # [B, N]
    u = u.masked_fill(void[:, None], -torch.inf)
    score = (torch.softmax(u, dim=-1) * worth).sum(dim=1)
    return score.masked_fill_(void, -torch.inf)  # also replaces the NaN of rows without pages


@op(tolerances=TOLERANCES)
def score_pages(
    q: Annotated[torch.Tensor, "B H*G D query"],
    kmin: Annotated[torch.Tensor, "P H D digest"],
    kmax: Annotated[torch.Tensor, "P H D digest"],
    table: Annotated[torch.Tensor, "B N int32"],
    n_full: Annotated[torch.Tensor, "B int32"],
    scale: float,
) -> torch.Tensor:
    """Score every full page of every request against its (predicted) query.

    Quest: u = sum_d max(q_d m_d, q_d M_d) = max(q, 0) . M + min(q, 0) . m, as m_d <= M_d: two matrix products.
    Pages are selected for all heads together, so a page's score is the sum of every head's softmax over the request's
    pages.

    Args:
        q: after RoPE; with 16-bit digests its values must be representable in their dtype, as the model's query is (a
            kernel rounds it to that).
        kmin, kmax: of one layer, see `build_layer_digests`.
        table: page ids below P; negative ones are padding.
        n_full: only the first n_full[b] columns of row b are candidates.
        scale: softmax scale, usually 1/sqrt(D).
    Returns:
        [B, N] float32; -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: Quest section 3.3 (bound), ScoutAttention Algorithm 1 line 5 (use); the sum over heads: ours.
    """
    (B, N), (H, D) = table.shape, kmin.shape[1:]
    ids = table.clamp(min=0).flatten()
    low, high = (x.index_select(0, ids).view(B, N, H, D).float() for x in (kmin, kmax))
    q = q.float().view(B, H, q.shape[1] // H, D) * scale
    u = torch.einsum("bhgd,bnhd->bhgn", q.clamp(min=0), high)
    u += torch.einsum("bhgd,bnhd->bhgn", q.clamp(max=0), low)
    return reduce_heads(u.flatten(1, 2), table, n_full)


@score_pages.native(sizes=HEAD_DIMS)
def _score_pages_native(q, kmin, kmax, table, n_full, scale):
    out = q.new_empty(table.shape, dtype=torch.float32)
    threads = torch.get_num_threads()
    _native.score_pages(q.float(), kmin, kmax, table, n_full, scale, out, threads)
    return out


score_pages.triton("score", sizes=triton.HEAD_DIMS)
