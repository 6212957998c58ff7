"""Page digests: elementwise minimum and maximum of a page's keys (Quest, section 3.3).

ScoutAttention (section 3.2) keeps the digest of every page on the GPU and scores pages by it alone.
Keys are in the pages after RoPE, so digests are too.
"""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import native, triton
from .layers import LayerPages, bind_source, source_rows
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


def build_layer_digests_reference(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """`build_layer_digests` by gather, reduce, scatter, layer after layer."""
    for layer, k in enumerate(source_rows(source, ids, rows)):
        low, high = digest_reference(k)
        kmin[layer].index_copy_(0, ids, low.to(kmin.device))
        kmax[layer].index_copy_(0, ids, high.to(kmax.device))


def _check(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    shapes = Shapes("build_layer_digests", L=len(source.k))
    bind_source(shapes, source, ids, rows)
    shapes.bind("kmin", kmin, "LPHD", source.k[0].dtype)
    shapes.bind("kmax", kmax, "LPHD", source.k[0].dtype)


BUILD_LAYER_DIGESTS = Op(
    "build_layer_digests",
    build_layer_digests_reference,
    [native.BUILD_LAYER_DIGESTS, triton.BUILD_LAYER_DIGESTS],
    check=_check,
    tolerances=TOLERANCES,
)


def build_layer_digests(
    source: LayerPages,
    ids: torch.Tensor,
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    rows: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write the digests of pages ``ids`` in every layer, all other rows stay as they are.

    On a device one launch, whatever the number of layers.

    Args:
        source: K of each layer, [P, S, H, D] any float dtype; the named pages are full. With ``rows``
            [R, S, H, D].
        ids: [n] int64 in [0, P); n may be 0.
        kmin, kmax: [L, P, H, D] dtype of K; mutated.
        rows: [L, n] int64 in [0, R), where the K of each page lies in each layer of ``source``; None: in
            the row of its id.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: Quest section 3.3, ScoutAttention section 3.2.
    """
    BUILD_LAYER_DIGESTS(source, ids, kmin, kmax, rows, impl=impl)
