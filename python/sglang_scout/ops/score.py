"""Score pages by their digests: an upper bound of q.k over the page (Quest, section 3.3)."""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import native, triton
from .op import op

REDUCTIONS = ["mass", "max"]

# At most D=256 products per head are accumulated in fp32 whatever the digest's dtype (16-bit digests are
# widened exactly), so only the order of summation differs; "max" subtracts two such sums.
_REASON = "fp32 sums of up to 256 products in another order, then exp or log"
TOLERANCES = {name: Tolerance(2e-5, 2e-5, _REASON) for name in ("float32", "bfloat16", "float16")}


def reduce_heads(
    u: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    reduce: str,
    worth: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, N] scores from ``u`` [B, HQ, N] of each query head; see `score_pages`. "mass" is weighted by ``worth``."""
    columns = torch.arange(table.shape[1], device=table.device)
    void = (columns >= n_full[:, None]) | (table < 0)  # [B, N]
    u = u.masked_fill(void[:, None], -torch.inf)
    if reduce == "mass":
        score = torch.softmax(u, dim=-1)
        score = (score if worth is None else score * worth).sum(dim=1)
    else:
        score = (u - torch.logsumexp(u, dim=-1, keepdim=True)).amax(dim=1)
    return score.masked_fill_(void, -torch.inf)  # also replaces the NaN of rows without pages


@op(
    kmin="P H D kv",
    kmax="P H D kv",
    table="B N int32",
    n_full="B int32",
    q="B H*G D query",
    reduce=REDUCTIONS,
    out="B N float32",
    arrivals="B int32",
    tolerances=TOLERANCES,
)
def score_pages(
    q: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    every: int = 1,
) -> torch.Tensor:
    """Score every full page of every request against its (predicted) query.

    Quest: u = sum_d max(q_d m_d, q_d M_d). Since m_d <= M_d, the maximum is q_d M_d where q_d > 0
    and q_d m_d elsewhere, so u = max(q, 0) . M + min(q, 0) . m: two matrix products.
    Pages are selected for all heads together, so the bounds of the query heads are reduced to one
    number: "mass" sums every head's softmax over the request's pages, "max" takes the largest
    log-softmax over the heads.

    Args:
        q: [B, HQ, D] any float dtype, after RoPE; with 16-bit digests its values must be representable in their dtype,
            as the model's query is (a kernel rounds it to that).
        kmin, kmax: [P, H, D] any float dtype, of one layer, see `build_layer_digests`; H divides HQ.
        table: [B, N] int32, page ids below P; negative ones are padding.
        n_full: [B] int32; only the first n_full[b] columns of row b are candidates.
        scale: softmax scale, usually 1/sqrt(D).
        out: [B, N] float32 to write into, instead of a new tensor.
        arrivals: [B] int32 zeros, a kernel's arrival counters, left as zeros; None: allocated. Not to be shared by
            concurrent calls.
        every: one row in so many is expected to have pages; only divides a kernel's work.
    Returns:
        [B, N] float32; -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: Quest section 3.3 (bound), ScoutAttention Algorithm 1 line 5 (use); reductions: ours.
    """
    (B, N), (H, D) = table.shape, kmin.shape[1:]
    ids = table.clamp(min=0).flatten()
    low, high = (x.index_select(0, ids).view(B, N, H, D).float() for x in (kmin, kmax))
    q = q.float().view(B, H, -1, D) * scale  # [B, H, G, D]
    u = torch.einsum("bhgd,bnhd->bhgn", q.clamp(min=0), high)
    u += torch.einsum("bhgd,bnhd->bhgn", q.clamp(max=0), low)
    score = reduce_heads(u.flatten(1, 2), table, n_full, reduce)
    return score if out is None else out.copy_(score)


@native.implements(score_pages)
def _native(q, kmin, kmax, table, n_full, scale, reduce, out, arrivals, every):
    (P, H, D), (B, N) = kmin.shape, table.shape
    q = q.float()
    out = q.new_empty((B, N)) if out is None else out
    native.module.score_pages(
        q.data_ptr(), kmin.data_ptr(), kmax.data_ptr(), native.DTYPES[kmin.dtype],
        P, H, q.shape[1] // H, D, table.data_ptr(), n_full.data_ptr(), B, N,
        float(scale), REDUCTIONS.index(reduce), out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


triton.implements(score_pages, "score", sizes={"D": triton.HEAD_DIMS})
