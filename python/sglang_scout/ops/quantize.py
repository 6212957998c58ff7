"""KV pages as int8 codes with one fp32 scale per page and KV head, K and V each on their own.

Symmetric, nearest code: with a = max |x| over the tokens and channels of one page and head,

    scale = a / 127,  code = round(x * (127 / a)),  value = code * scale.

A page and head whose a is below 2^-100 becomes zeros with scale 0; one that holds an infinity or a
NaN gets the scale NaN, so that attending to it gives NaN instead of a plausible number.
"""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import native_int8
from .shapes import Shapes

LARGEST_CODE = 127
NO_MAGNITUDE = 2.0**-100
# |x - value| in units of the scale: half a step, and the roundings of x * (127 / a) and of the
# scale, each within 127 units in the last place of 24 bits.
MAX_ERROR_STEPS = 0.5 + 1e-4

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "the same fp32 operations element by element")
    for name in ("float32", "bfloat16", "float16")
}


def quantize_pages_reference(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of whole pages.

    Args:
        pages: [n, S, H, D] float32, bfloat16 or float16.
    Returns:
        (codes [n, S, H, D] int8, scale [n, H] float32).
    """
    x = pages.float()
    largest = x.abs().amax((1, 3))
    finite = x.isfinite().all(3).all(1)
    used = finite & (largest >= NO_MAGNITUDE)
    largest = largest.where(used, 1.0)
    # Not LARGEST_CODE / largest: torch computes that as a reciprocal and a product.
    factor = torch.full_like(largest, LARGEST_CODE).div(largest).where(used, 0.0)
    x = x.where(finite[:, None, :, None], 0.0)
    codes = (x * factor[:, None, :, None]).round().to(torch.int8)
    scale = (largest / LARGEST_CODE).where(used, 0.0)
    return codes, scale.where(finite, torch.nan)


def dequantize_pages(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of codes [n, S, H, D] int8 with scale [n, H] float32, as float32."""
    return codes.float() * scale[:, None, :, None]


def _reference(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """`quantize_pages` by gather, quantise, scatter."""
    new_codes, new_scale = quantize_pages_reference(src.index_select(0, src_ids))
    codes.index_copy_(0, dst_ids, new_codes)
    scale.index_copy_(0, dst_ids, new_scale)


def _check(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    shapes = Shapes("quantize_pages")
    shapes.bind("src", src, "PSHD")
    shapes.bind("src_ids", src_ids, "n", torch.int64)
    shapes.bind("codes", codes, "CSHD", torch.int8)
    shapes.bind("scale", scale, "CH", torch.float32)
    shapes.bind("dst_ids", dst_ids, "n", torch.int64)
    if src.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        shapes.fail(f"src has dtype {src.dtype}, expected float32, bfloat16 or float16")


QUANTIZE_PAGES = Op(
    "quantize_pages",
    _reference,
    [native_int8.QUANTIZE_PAGES],
    check=_check,
    tolerances=TOLERANCES,
)


def quantize_pages(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    dst_ids: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Quantise page src_ids[i] of ``src`` into page dst_ids[i] of ``codes`` and ``scale``.

    All S tokens of a page count, so the named pages are full. Other rows stay as they are. The
    error of a value is at most ``MAX_ERROR_STEPS`` times the scale of its page and head.

    Args:
        src: [P, S, H, D] float32, bfloat16 or float16.
        src_ids: [n] int64 in [0, P); n may be 0.
        codes: [C, S, H, D] int8; mutated.
        scale: [C, H] float32; mutated.
        dst_ids: [n] int64 in [0, C), no id twice.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    """
    QUANTIZE_PAGES(src, src_ids, codes, scale, dst_ids, impl=impl)
