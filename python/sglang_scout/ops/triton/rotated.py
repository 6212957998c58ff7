"""Rotation for rotated digests on the device: queries as integers, and `build_layer_rotated`."""

import torch
import triton
import triton.language as tl

from ..pages import LARGEST
from ..rotated import FIRST, FLIP, PAGE_TOKENS, SECOND, STATS_BYTES
from .common import limited, rounded, widened
from .pages import for_each_page, layer_pointer, source_of

_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)
_LARGEST, _FLIP32 = tl.constexpr(LARGEST), tl.constexpr(FLIP - 2**32)
_TOKENS, _STATS_BYTES = tl.constexpr(PAGE_TOKENS), tl.constexpr(STATS_BYTES)
NORMS_AT = tl.constexpr(2 * PAGE_TOKENS + 8)  # after the mean, the scales and two steps
_TINY = tl.constexpr(1.1754943508222875e-38)
_TOP = tl.constexpr(127 * 256.0)  # range of two int8 digits


@triton.constexpr_function
def width_of(D):
    """Elements that hold a row of D."""
    return max(32, triton.next_power_of_2(D))


@triton.jit
def rint(x):
    """Round to nearest even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def step_of(largest, LEVELS: tl.constexpr):
    """Quantization step for which ``largest`` is LEVELS steps; never 0."""
    return tl.maximum(tl.div_rn(largest, LEVELS), _TINY)


@triton.jit
def rows_of(x, row, kept, D: tl.constexpr, FP8: tl.constexpr = 0):
    """The rows at ``x + row`` [M], D elements each: [M, BLOCK_D] float32, finite, 0 beyond D."""
    d = tl.arange(0, width_of(D))[None, :]
    x = tl.load(x + row[:, None] + d, mask=kept[:, None] & (d < D), other=0)
    return limited(widened(x, FP8), _LARGEST)


@triton.jit
def rotated(x, D: tl.constexpr):
    """R x for x [M, BLOCK_D] float32: sign flips, then Hadamard blocks of the largest power of two that divides D."""
    WIDTH: tl.constexpr = D & -D
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = tl.where(((tl.arange(0, N) + 1) * _FLIP32 < 0)[None, :], -x, x)
    second = tl.arange(0, 2)[None, None, :, None] == 1
    for i in tl.static_range(0, 10):
        if (1 << i) < WIDTH:
            pair = tl.reshape(x, (M, N // (2 << i), 2, 1 << i))
            total = tl.sum(pair, axis=2, keep_dims=True)
            x = tl.reshape(tl.where(second, total - 2 * pair, total), (M, N))
    return x * WIDTH**-0.5


@triton.constexpr_function
def heads_of(G):
    """Rows that hold the G query heads of a KV head."""
    return max(8, triton.next_power_of_2(G))


@triton.jit
def digits(x):
    """Integers |x| <= 127 * 256 [G, D] as 256 a + b: a in even rows and b in odd ones, [2 G, D] int8."""
    x = x.to(tl.int32)
    high = (x + 128) >> 8
    both = tl.permute(tl.join(high.to(tl.int8), (x - 256 * high).to(tl.int8)), (0, 2, 1))
    return tl.reshape(both, (2 * x.shape[0], x.shape[1]))


@triton.jit
def query_digits(q, row, kept, scale, D: tl.constexpr):
    """The rotated queries at ``q + row`` [G] as integers, for the mean and each plane [2 G, BLOCK_D]; the unit of these
    integers [G], and the dequantized sum of the planes' [G]. A plane's are scaled by its level and 2^-r, in its
    operand's order: channel 4 c + r at r BLOCK_D / 4 + c."""
    G: tl.constexpr = row.shape[0]
    BLOCK_D: tl.constexpr = width_of(D)
    power = (1 << tl.arange(0, BLOCK_D) // (BLOCK_D // 4)).to(tl.float32)[None, :]
    x = rotated(rows_of(q, row, kept, D), D) * scale
    unit = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) / _TOP
    of_mean = digits(rint(x / unit[:, None]))
    x = tl.permute(tl.reshape(x, (G, BLOCK_D // 4, 4)), (0, 2, 1))
    x = tl.reshape(x, (G, BLOCK_D)) / unit[:, None] * _FIRST
    first = rint(x / power)
    second = rint(x * ((_SECOND / _FIRST) / power))
    total = tl.sum(first * power, axis=1) + tl.sum(second * power, axis=1)
    return of_mean, digits(first), digits(second), unit, total * unit


@triton.jit
def query_digits_kernel(q, digits_to, numbers, scale, G: tl.constexpr, D: tl.constexpr):
    """`query_digits` of a request's KV head. q [B, HQ, D]; digits_to [B, HQ, 2, 3, BLOCK_D] int8, of the mean and the
    planes; numbers [2, B, HQ]: units, totals."""
    BLOCK_G: tl.constexpr = heads_of(G)
    BLOCK_D: tl.constexpr = width_of(D)
    h, b = tl.program_id(0), tl.program_id(1)
    first_head = (b * tl.num_programs(0) + h) * G
    i, g, d = tl.arange(0, 2 * BLOCK_G), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    of_mean, first, second, unit, total = query_digits(q, (first_head + g) * D, g < G, scale, D)
    at = digits_to + (2 * first_head + i)[:, None] * (3 * BLOCK_D) + d[None, :]
    mask = (i < 2 * G)[:, None] & (d >= 0)[None, :]
    tl.store(at, of_mean, mask=mask)
    tl.store(at + BLOCK_D, first, mask=mask)
    tl.store(at + 2 * BLOCK_D, second, mask=mask)
    heads = tl.num_programs(1) * tl.num_programs(0) * G
    at = numbers + first_head + g
    tl.store(at, unit, mask=g < G)
    tl.store(at + heads, total, mask=g < G)


@triton.jit
def packed(bits):
    """[32, D] 0 or 1 -> [16, D / 4] uint8, see `ops.rotated`."""
    D: tl.constexpr = bits.shape[1]
    t, d = tl.arange(0, _TOKENS), tl.arange(0, D)
    # [32, D]
    placed = bits.to(tl.int32) << (t[:, None] // 16 * 4 + d[None, :] % 4)
    return tl.sum(tl.sum(tl.reshape(placed, (2, 16, D // 4, 4)), axis=3), axis=0).to(tl.uint8)


@triton.jit
def build_rotated_kernel(
    addresses, ids, rows, planes, means, scales, steps,
    P, R,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, KV: tl.constexpr, FP8: tl.constexpr, ALIGN: tl.constexpr,
):
    """One page, head and layer, as `pages.digest_kernel`. addresses [2, L] of K and V; planes
    [L, P, H, 2, 16, D / 4]; means, scales, steps: the stats [L, P, H, bytes] as int8, bfloat16 and float32."""
    BLOCK_D: tl.constexpr = width_of(D)
    k, source, row = source_of(addresses, ids, rows, P, R, KV, ALIGN)
    h, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if row >= 0:
        t, d = tl.arange(0, _TOKENS), tl.arange(0, BLOCK_D)
        at = ((source * _TOKENS + t) * H + h) * D
        v = layer_pointer(addresses + tl.num_programs(2), layer, KV, ALIGN)
        v = rows_of(v, at, t < _TOKENS, D, FP8)
        norm = tl.sqrt_rn(tl.sum(v * v, axis=1))  # [32]
        norm_step = step_of(tl.max(norm, axis=0), 255.0)
        x = rotated(rows_of(k, at, t < _TOKENS, D, FP8), D)  # [32, BLOCK_D]
        mean = tl.sum(x, axis=0) / _TOKENS
        step = step_of(tl.max(tl.abs(mean), axis=0), 127.0)
        mean = rint(tl.div_rn(mean, tl.zeros_like(mean) + step))
        x = x - (mean * step)[None, :]
        scale = tl.sqrt_rn(tl.sum(x * x, axis=1) / D)  # [32]
        BYTES: tl.constexpr = D + _STATS_BYTES
        tl.store(means + row * BYTES + d, mean.to(tl.int8), mask=d < D)
        tl.store(scales + row * (BYTES // 2) + D // 2 + t, rounded(scale, tl.bfloat16))
        at = steps + row * (BYTES // 4) + D // 4 + _TOKENS // 2
        tl.store(at, step)
        tl.store(at + 1, norm_step)
        norm = rint(tl.div_rn(norm, tl.zeros_like(norm) + norm_step)).to(tl.int32)
        tl.store(means + row * BYTES + D + NORMS_AT + t, norm.to(tl.int8))
        tl.store(
            at + (BYTES - D) // 4 - _TOKENS // 2 - 2 + tl.arange(0, 2), tl.zeros([2], tl.float32)
        )
        j, c = tl.arange(0, 16)[:, None], tl.arange(0, BLOCK_D // 4)[None, :]
        at = planes + row * (8 * D) + j * (D // 4) + c
        first = x >= 0
        tl.store(at, packed(first), mask=c < D // 4)
        outer = tl.abs(x) > scale[:, None] * _FIRST
        tl.store(at + 4 * D, packed(first == outer), mask=c < D // 4)


def build_layer_rotated(source, ids, planes, stats, rows=None):
    dtypes = torch.int8, torch.bfloat16, torch.float32
    to = planes, *(stats.view(dtype) for dtype in dtypes)
    for_each_page(build_rotated_kernel, source, ids, rows, to)
