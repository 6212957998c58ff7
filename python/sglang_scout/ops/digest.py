"""Page digests: elementwise minimum and maximum of a page's keys (Quest, section 3.3).

ScoutAttention (section 3.2) keeps the digest of every page on the GPU and scores pages by it alone.
Keys are in the pages after RoPE, so digests are too.
"""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import native, triton
from .shapes import Shapes

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "a minimum is one of the inputs: nothing is rounded")
    for name in ("float32", "bfloat16", "float16")
}


def digest_reference(k_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of every key channel within each page.

    Quest: m_d = min_t K[t, d], M_d = max_t K[t, d] over the tokens t of the page.

    Args:
        k_pages: [n, S, H, D], full pages.
    Returns:
        (kmin [n, H, D], kmax [n, H, D]) in the dtype of ``k_pages``; exact.
    """
    return torch.aminmax(k_pages, dim=1)


def build_digests_reference(
    k: torch.Tensor, ids: torch.Tensor, kmin: torch.Tensor, kmax: torch.Tensor
) -> None:
    """`build_digests` by gather, reduce, scatter."""
    low, high = digest_reference(k.index_select(0, ids))
    kmin.index_copy_(0, ids, low)
    kmax.index_copy_(0, ids, high)


def _check(k: torch.Tensor, ids: torch.Tensor, kmin: torch.Tensor, kmax: torch.Tensor) -> None:
    shapes = Shapes("build_digests")
    shapes.bind("k", k, "PSHD")
    shapes.bind("ids", ids, "n", torch.int64)
    shapes.bind("kmin", kmin, "PHD", k.dtype)
    shapes.bind("kmax", kmax, "PHD", k.dtype)


BUILD_DIGESTS = Op(
    "build_digests",
    build_digests_reference,
    [native.BUILD_DIGESTS, triton.BUILD_DIGESTS],
    check=_check,
    tolerances=TOLERANCES,
)


def build_digests(
    k: torch.Tensor,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Write the digests of pages ``ids``, all other rows stay as they are.

    Args:
        k: [P, S, H, D] any float dtype; the named pages are full.
        ids: [n] int64 in [0, P); n may be 0.
        kmin, kmax: [P, H, D] dtype of ``k``; mutated.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: Quest section 3.3, ScoutAttention section 3.2.
    """
    BUILD_DIGESTS(k, ids, kmin, kmax, impl=impl)
