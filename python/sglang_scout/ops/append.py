"""Write a step's new K and V into each request's partially filled page."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.registry import Tolerance
from . import triton
from .layers import KV_DTYPE_NAMES
from .op import op

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "one rounding to the dtype of the pages, to the nearest even")
    for name in KV_DTYPE_NAMES
}


class Pool(NamedTuple):
    """Where to append: pages of K and V, and the page id of each row (negative: none).

    k, v: [P, S, H, D]. ids: [B] int32.
    """

    k: torch.Tensor
    v: torch.Tensor
    ids: torch.Tensor


@op(
    k="B H D new",
    v="B H D new",
    lens="B int32",
    pool=("P S H D kv", "P S H D kv", "B int32"),
    mirror=("M S H D kv", "M S H D kv", "B int32"),
    tolerances=TOLERANCES,
)
def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    pool: Pool,
    mirror: Pool | None = None,
) -> None:
    """Write each request's new token to the end of its partially filled page.

    pages[ids[b], lens[b] - 1] = new[b] where ids[b] >= 0. fp8 is rounded as by torch's and SGLang's ``.to``: values out
    of range become inf in e5m2, and NaN in e4m3 (448 since torch 2.14).

    Args:
        k, v: [B, H, D] any float dtype; rows may be strided, as views of a fused projection are.
        lens: [B] int32, tokens in the page including the new one, 1..S.
        pool: the resident slots; mutated.
        mirror: the host pages, same dtype as ``pool``, with their own page ids; mutated. On a CUDA device they
            are pinned memory that the device can write. Page ids must be distinct.
    Source: the operation is ours (step 4 of the decode step in docs/architecture.md).
    """
    for pages_k, pages_v, ids in (pool,) if mirror is None else (pool, mirror):
        rows = (ids >= 0).nonzero().squeeze(1)
        at = [x.to(pages_k.device) for x in (ids[rows].long(), lens[rows].long() - 1)]
        for new, pages in ((k, pages_k), (v, pages_v)):
            pages[at[0], at[1]] = new[rows].to(pages.device, pages.dtype)


triton.implements(
    append_tokens,
    "pages",
    pinned=("mirror.k", "mirror.v"),
    dtypes=triton.KV_DTYPES,
    sizes={"D": triton.HEAD_DIMS},
    strided_rows=("k", "v"),
)
