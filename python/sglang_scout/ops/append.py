"""Write a step's new K and V into the pages that the requests are filling."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.registry import Op, Tolerance
from . import triton
from .shapes import Shapes

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "one rounding to the dtype of the pages, to the nearest even")
    for name in ("float32", "bfloat16", "float16")
}


class Pool(NamedTuple):
    """Where to append: pages of K and V, and of each row the page (negative: none).

    k, v: [P, S, H, D]. ids: [B] int32.
    """

    k: torch.Tensor
    v: torch.Tensor
    ids: torch.Tensor


def append_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    pool: Pool,
    mirror: Pool | None = None,
) -> None:
    """`append_tokens` in plain torch: pages[ids[b], lens[b] - 1] = new[b] where ids[b] >= 0."""
    for pages_k, pages_v, ids in (pool,) if mirror is None else (pool, mirror):
        rows = (ids >= 0).nonzero().squeeze(1)
        at = [x.to(pages_k.device) for x in (ids[rows].long(), lens[rows].long() - 1)]
        for new, pages in ((k, pages_k), (v, pages_v)):
            pages[at[0], at[1]] = new[rows].to(pages.device, pages.dtype)


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    pool: Pool,
    mirror: Pool | None = None,
) -> None:
    shapes = Shapes("append_tokens")
    shapes.bind("k", k, "BHD")
    shapes.bind("v", v, "BHD", k.dtype)
    shapes.bind("lens", lens, "B", torch.int32)
    for name, to, page in (("pool", pool, "P"), ("mirror", mirror, "M")):
        if to is not None:
            shapes.bind(f"{name}.k", to.k, f"{page}SHD", pool.k.dtype)
            shapes.bind(f"{name}.v", to.v, f"{page}SHD", pool.k.dtype)
            shapes.bind(f"{name}.ids", to.ids, "B", torch.int32)


APPEND_TOKENS = Op(
    "append_tokens",
    append_reference,
    [triton.APPEND_TOKENS],
    check=_check,
    tolerances=TOLERANCES,
)


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    pool: Pool,
    mirror: Pool | None = None,
    impl: str = "auto",
) -> None:
    """Write each request's new token as the last of the page that it is filling.

    Args:
        k, v: [B, H, D] any float dtype; rows may be strided, as views of a fused projection are.
        lens: [B] int32, tokens in the page with the new one, 1..S.
        pool: the resident slots; mutated.
        mirror: the host pages, dtype of ``pool``, its own page ids; mutated. On a CUDA device they
            are page-locked memory that the device can write. No page may be named twice.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: the operation is ours (step 4 of the decode step in docs/architecture.md).
    """
    APPEND_TOKENS(k, v, lens, pool, mirror, impl=impl)
