"""KV pages as int8 codes with one fp32 scale per page and KV head, K and V each on their own.

Symmetric, nearest code: with a = max |x| over the tokens and channels of one page and head,

    scale = a / 127,  code = round(x * (127 / a)),  value = code * scale.

A page and head whose a is below 2^-100 becomes zeros with scale 0; one that holds an infinity or a
NaN gets the scale NaN, so that attending to it gives NaN instead of a plausible number.

A page has its codes head by head, K and then V, in the order in which a vector of them meets the query,
or the weights of its tokens, without a shuffle: K as [S / 16, D / 4, 16, 4], V as [S / 4, D, 4], with S
rounded up to whole blocks of 16 tokens and zeros where a page has none. Of each four the second and the
third have changed places, so that two shifts split 16-bit words into neighbours.
"""

from __future__ import annotations

import torch

from ..core.page_bytes import CODED_BLOCK_TOKENS, coded_tokens
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


_PLACES = [0, 2, 1, 3]  # its own inverse


def _split_tokens(codes: torch.Tensor, tokens: int) -> torch.Tensor:
    """Codes [n, S, H, D], whole blocks of them, as [n, S / tokens, tokens, H, D]."""
    more = coded_tokens(codes.shape[1]) - codes.shape[1]
    whole = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, more))
    return whole.unflatten(1, (whole.shape[1] // tokens, tokens))


def order_codes(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Codes of K and of V, each [n, S, H, D] int8, as the codes of pages.

    Returns:
        [n, H, 2, C * D] int8, C = `coded_tokens` (S).
    """
    D = k.shape[3]
    blocks = _split_tokens(k, CODED_BLOCK_TOKENS).unflatten(4, (D // 4, 4))
    keys = blocks.permute(0, 3, 1, 4, 2, 5)[..., _PLACES].flatten(2)
    values = _split_tokens(v, 4).permute(0, 3, 1, 4, 2)[..., _PLACES].flatten(2)
    return torch.stack((keys, values), 2)


def plain_codes(
    codes: torch.Tensor, page_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of K and of V, each [n, S, H, D] int8, of the codes of pages [n, H, 2, C * D]."""
    C = coded_tokens(page_size)
    keys = codes[:, :, 0].unflatten(2, (C // CODED_BLOCK_TOKENS, head_dim // 4, -1, 4))
    values = codes[:, :, 1].unflatten(2, (C // 4, head_dim, 4))
    k = keys[..., _PLACES].permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(-2)
    v = values[..., _PLACES].permute(0, 2, 4, 1, 3).flatten(1, 2)
    return k[:, :page_size].contiguous(), v[:, :page_size].contiguous()


def dequantize_pages(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of codes [n, S, H, D] int8 with scale [n, H] float32, as float32."""
    return codes.float() * scale[:, None, :, None]


def room_for(pages: int, page_size: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of so many pages of S tokens, H KV heads and D channels; not initialised."""
    codes = torch.empty(pages, heads, 2, coded_tokens(page_size) * dim, dtype=torch.int8)
    return codes, torch.empty(pages, 2, heads)


def _reference(
    k: torch.Tensor,
    v: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """`quantize_pages` by gather, quantise, scatter."""
    (new_k, k_scale), (new_v, v_scale) = (
        quantize_pages_reference(plane.index_select(0, src_ids)) for plane in (k, v)
    )
    codes.index_copy_(0, dst_ids, order_codes(new_k, new_v))
    scales.index_copy_(0, dst_ids, torch.stack((k_scale, v_scale), 1))


def bind_codes(
    shapes: Shapes, codes: torch.Tensor, scales: torch.Tensor, pages: str, page_size: int, dim: int
) -> None:
    """Check codes and scales of pages; ``shapes`` knows H or learns it.

    Raises:
        ValueError: as `Shapes.bind`.
    """
    shapes.sizes |= {"c": coded_tokens(page_size) * dim, "2": 2}
    shapes.bind("codes", codes, f"{pages}H2c", torch.int8)
    shapes.bind("scales", scales, f"{pages}2H", torch.float32)


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    shapes = Shapes("quantize_pages")
    shapes.bind("k", k, "PSHD")
    shapes.bind("v", v, "PSHD", k.dtype)
    shapes.bind("src_ids", src_ids, "n", torch.int64)
    if shapes["D"] % 4:
        shapes.fail(f"k has D={shapes['D']}, expected a multiple of 4")
    bind_codes(shapes, codes, scales, "C", shapes["S"], shapes["D"])
    shapes.bind("dst_ids", dst_ids, "n", torch.int64)
    if k.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        shapes.fail(f"k has dtype {k.dtype}, expected float32, bfloat16 or float16")


QUANTIZE_PAGES = Op(
    "quantize_pages",
    _reference,
    [native_int8.QUANTIZE_PAGES],
    check=_check,
    tolerances=TOLERANCES,
)


def quantize_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dst_ids: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Quantise page src_ids[i] of ``k`` and ``v`` into page dst_ids[i] of ``codes`` and ``scales``.

    All S tokens of a page count, so the named pages are full. Other rows stay as they are. The
    error of a value is at most ``MAX_ERROR_STEPS`` times the scale of its page and head.

    Args:
        k, v: [P, S, H, D] float32, bfloat16 or float16.
        src_ids: [n] int64 in [0, P); n may be 0.
        codes: [C, H, 2, c] int8, c = `coded_tokens` (S) * D; mutated. `room_for` makes them.
        scales: [C, 2, H] float32; mutated.
        dst_ids: [n] int64 in [0, C), no id twice.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    """
    QUANTIZE_PAGES(k, v, src_ids, codes, scales, dst_ids, impl=impl)
