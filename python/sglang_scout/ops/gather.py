"""Copy whole pages between two pools (recall into resident slots)."""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import native, triton
from .shapes import Shapes

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "bytes are copied") for name in ("float32", "bfloat16", "float16")
}


def copy_pages_reference(
    src: torch.Tensor, src_ids: torch.Tensor, dst: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """`copy_pages` as gather, move, scatter: dst[dst_ids[i]] = src[src_ids[i]]."""
    pages = src.index_select(0, src_ids.to(src.device)).to(dst.device)
    dst.index_copy_(0, dst_ids.to(dst.device), pages)


def _check(
    src: torch.Tensor, src_ids: torch.Tensor, dst: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    shapes = Shapes("copy_pages")
    shapes.bind("src_ids", src_ids, "n", torch.int64)
    shapes.bind("dst_ids", dst_ids, "n", torch.int64)
    if src.dtype != dst.dtype or src.shape[1:] != dst.shape[1:] or src.dim() < 1:
        shapes.fail(
            f"dst has pages {dst.dtype}{list(dst.shape[1:])}, "
            f"expected {src.dtype}{list(src.shape[1:])}"
        )


COPY_PAGES = Op(
    "copy_pages",
    copy_pages_reference,
    [native.COPY_PAGES, triton.COPY_PAGES],
    check=_check,
    tolerances=TOLERANCES,
)


def copy_pages(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    dst: torch.Tensor,
    dst_ids: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Copy page src_ids[i] of ``src`` to page dst_ids[i] of ``dst``; other pages stay as they are.

    Args:
        src: [P, ...] any dtype, any device.
        src_ids: [n] int64 in [0, P); n may be 0.
        dst: [Ns, ...] dtype and page shape of ``src``; mutated, on its device's current stream.
        dst_ids: [n] int64 in [0, Ns), no id twice.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: recall of ScoutAttention section 3.4; the operation itself is ours.
    """
    COPY_PAGES(src, src_ids, dst, dst_ids, impl=impl)
