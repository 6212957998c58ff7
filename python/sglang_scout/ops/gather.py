"""Copy whole pages of any layers into resident slots, as recall does."""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import native, triton
from .layers import LayerPages
from .shapes import Shapes

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "bytes are copied") for name in ("float32", "bfloat16", "float16")
}


def copy_layer_pages_reference(
    source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> None:
    """`copy_layer_pages` as gather, move, scatter of each layer, K and V."""
    layers, pages, slots = ids[:, ids[1] >= 0].cpu()
    named = layers.unique().tolist()
    if not all(0 <= layer < len(source.k) for layer in named):
        raise IndexError(f"layers are {named}, expected values in [0, {len(source.k)})")
    for layer in named:
        here = layers == layer
        for planes, dst in ((source.k, dst_k), (source.v, dst_v)):
            copied = planes[layer].index_select(0, pages[here].to(planes[layer].device))
            dst[layer].index_copy_(0, slots[here].to(dst.device), copied.to(dst.device))


def _check(source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor) -> None:
    shapes = Shapes("copy_layer_pages")
    if ids.dtype != torch.int64 or ids.dim() != 2 or len(ids) != 3:
        shapes.fail(f"ids is {ids.dtype}{list(ids.shape)}, expected torch.int64[3, n]")
    page = source.k[0]
    for name, dst in (("dst_k", dst_k), ("dst_v", dst_v)):
        if dst.dtype != page.dtype or dst.dim() < 2 or dst.shape[2:] != page.shape[1:]:
            shapes.fail(
                f"{name} has pages {dst.dtype}{list(dst.shape[2:])}, "
                f"expected {page.dtype}{list(page.shape[1:])}"
            )
        if len(dst) != len(source.k) or dst.shape != dst_k.shape:
            shapes.fail(f"{name} is {list(dst.shape)}, expected {len(source.k)} layers, as dst_k")


COPY_LAYER_PAGES = Op(
    "copy_layer_pages",
    copy_layer_pages_reference,
    [native.COPY_LAYER_PAGES, triton.COPY_LAYER_PAGES],
    check=_check,
    tolerances=TOLERANCES,
)


def copy_layer_pages(
    source: LayerPages,
    ids: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Copy K and V of pages of any layers: page ids[1, i] of layer ids[0, i] goes to slot ids[2, i].

    On a device one launch, whatever the number of layers.

    Args:
        source: the pages, on any device; kernels refuse memory of the targets.
        ids: [3, n] int64: layers in [0, L), pages below P, those below 0 are skipped, slots in [0, Ns); n may
            be 0, no (layer, slot) twice, a page as often as you like.
        dst_k, dst_v: [L, Ns, ...] dtype and page shape of ``source``, contiguous; mutated, on their
            device's current stream.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: recall of ScoutAttention section 3.4; the operation itself is ours.
    """
    COPY_LAYER_PAGES(source, ids, dst_k, dst_v, impl=impl)
