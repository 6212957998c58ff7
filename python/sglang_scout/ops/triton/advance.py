"""`advance_input` on the device: with a learned correction one pass to its rank, a sum, one pass back.

Bytes that must move: 4 C e a row (x, before, after, result), and with a correction of rank r its 12 C r
+ 4 C once for every 16 rows; the low-rank sums in between are 8 r + 8 per row and 64 channels, written
and read once more.
"""

import torch
import triton
import triton.language as tl

from .exact import dot_fp32, rounded

_BLOCK_C, _BLOCK_B = 64, 16
_SUMMED = 32  # blocks of channels whose sums a program reads at once
_EPS = tl.constexpr(1e-12)


@triton.jit
def lower_kernel(
    x,
    after,
    now,
    previous,
    low,
    squares,
    B,
    C,
    R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """x A and after B over one block of channels, and the sums of squares.

    x, after [B, C]; now, previous [C, R]; low [blocks, 2, B, R]; squares [blocks, 2, B].
    """
    block = tl.program_id(0)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    rows = (b < B)[:, None] & (c < C)[None, :]
    weights = (c < C)[:, None] & (r < R)[None, :]
    kept = (b < B)[:, None] & (r < R)[None, :]
    for which in tl.static_range(2):
        source = x if which == 0 else after
        matrix = now if which == 0 else previous
        # [BLOCK_B, BLOCK_C], [BLOCK_C, BLOCK_R] and their product [BLOCK_B, BLOCK_R]
        value = tl.load(source + b[:, None] * C + c[None, :], mask=rows, other=0.0).to(tl.float32)
        weight = tl.load(matrix + c[:, None] * R + r[None, :], mask=weights, other=0.0)
        part = dot_fp32(value, weight, tl.zeros([BLOCK_B, BLOCK_R], tl.float32))
        to = (block * 2 + which) * B + b
        tl.store(low + to[:, None] * R + r[None, :], part, mask=kept)
        tl.store(squares + to, tl.sum(value * value, axis=1), mask=b < B)


@triton.jit
def condense_kernel(
    low,
    squares,
    lower,
    sizes,
    B,
    C,
    blocks,
    R: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One row's sums over all blocks of channels: lower [B, R] = x A / |x| + after B / |after|, sizes [B] = |x|.

    On its own, since otherwise each block of channels of the pass back would add up all of it again.
    """
    b = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    total = tl.zeros([BLOCK_R], tl.float32)
    for which in tl.static_range(2):
        part = tl.zeros([BLOCK_R], tl.float32)
        square = tl.zeros([], tl.float32)
        for first in range(0, blocks, SUMMED):
            block = first + tl.arange(0, SUMMED)
            at = (block * 2 + which) * B + b
            some = block < blocks
            mask = some[:, None] & (r < R)[None, :]
            # [SUMMED, BLOCK_R]
            part += tl.sum(
                tl.load(low + at[:, None] * R + r[None, :], mask=mask, other=0.0), axis=0
            )
            square += tl.sum(tl.load(squares + at, mask=some, other=0.0), axis=0)
        size = tl.sqrt(square / C + _EPS)
        total += part / size
        if which == 0:
            tl.store(sizes + b, size)
    tl.store(lower + b * R + r, total, mask=r < R)


@triton.jit
def advance_kernel(
    x,
    before,
    after,
    known,
    out_matrix,
    bias,
    lower,
    sizes,
    out,
    carry,
    B,
    C,
    HAS_CORRECTION: tl.constexpr,
    R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One block of channels of one block of rows. known [B] uint8; out_matrix [R, C]; bias [C];
    lower [B, R] and sizes [B] as `condense_kernel` leaves them."""
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (b < B)[:, None] & (c < C)[None, :]
    at = b[:, None] * C + c[None, :]
    # [BLOCK_B, BLOCK_C]
    kept = tl.load(x + at, mask=mask, other=0.0)
    value = kept.to(tl.float32)
    newer = tl.load(after + at, mask=mask, other=0.0).to(tl.float32)
    older = tl.load(before + at, mask=mask, other=0.0).to(tl.float32)
    moved = value + carry * (newer - older)
    if HAS_CORRECTION:
        r = tl.arange(0, BLOCK_R)
        size = tl.load(sizes + b, mask=b < B, other=1.0)
        kept_rank = (b < B)[:, None] & (r < R)[None, :]
        # [BLOCK_B, BLOCK_R] and [BLOCK_R, BLOCK_C]
        low_rank = tl.load(lower + b[:, None] * R + r[None, :], mask=kept_rank, other=0.0)
        matrix = tl.load(
            out_matrix + r[:, None] * C + c[None, :],
            mask=(r < R)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        higher = dot_fp32(low_rank, matrix, tl.zeros([BLOCK_B, BLOCK_C], tl.float32))
        higher += tl.load(bias + c, mask=c < C, other=0.0)[None, :]
        moved += size[:, None] * higher
    moved = rounded(moved, out.dtype.element_ty)
    seen = tl.load(known + b, mask=b < B, other=0) != 0
    tl.store(out + at, tl.where(seen[:, None], moved, kept), mask=mask)


def advance_input(x, before, after, known, carry, correction):
    """See `ops.advance.advance_input`."""
    (B, C), out = x.shape, torch.empty_like(x)
    if x.numel() == 0:
        return out
    grid = triton.cdiv(C, _BLOCK_C), triton.cdiv(B, _BLOCK_B)
    now, previous, out_matrix, bias = correction or (None,) * 4
    R = 0 if now is None else now.shape[1]
    block_r = max(16, triton.next_power_of_2(R))
    tile = (_BLOCK_B, _BLOCK_C, block_r)
    lower = sizes = None
    if now is not None:
        low = x.new_empty((grid[0], 2, B, R), dtype=torch.float32)
        squares = x.new_empty((grid[0], 2, B), dtype=torch.float32)
        lower_kernel[grid](
            x, after, now, previous, low, squares, B, C, R, *tile, num_warps=4, num_stages=1
        )
        lower = x.new_empty((B, R), dtype=torch.float32)
        sizes = x.new_empty(B, dtype=torch.float32)
        condense_kernel[(B,)](
            low, squares, lower, sizes, B, C, grid[0], R, _SUMMED, block_r, num_warps=4
        )
    advance_kernel[grid](
        x,
        before,
        after,
        known.view(torch.uint8),
        out_matrix,
        bias,
        lower,
        sizes,
        out,
        carry,
        B,
        C,
        now is not None,
        R,
        *tile,
        num_warps=4,
        num_stages=1,
    )
    return out
