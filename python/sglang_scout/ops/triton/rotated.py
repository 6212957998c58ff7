"""`score_rotated` and `log_mass_rotated` on the device.

Bytes that must move, with b bits: 4 D b + D + 80 per page and KV head, and 8 per page for id and score. Scratch as
in `score`.

The tensor cores take bits as they are stored. A word of a plane holds 16 channels of two tokens; one mask
leaves channels r, 4 + r, 8 + r and 12 + r of one of them as the bytes of an int8 operand, 0 or 2^r, so that a
key element costs a third of an instruction. The query takes the power of two back: it is rounded to
integers of 15 bits at most (12 for r = 3), which are two int8 digits.
"""

import torch
import triton
import triton.language as tl

from ..rotated import FIRST, ONE_BIT, SECOND, STATS_BYTES
from .exact import finite
from .rotate import rint, rotated_rows
from .score import Scratch

_FIRST, _SECOND, _ONE_BIT = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(ONE_BIT)
_STATS_BYTES = tl.constexpr(STATS_BYTES)
_TOP = tl.constexpr(127 * 256.0)  # of what two int8 digits hold
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = 1.4426950408889634
_BLOCK_PAGES = 64  # the rows of one warp group's product


@triton.jit
def store_digits(at, x):
    """Integers |x| <= 127 * 256 as x = 256 a + b: a at ``at`` and b BLOCK_D bytes behind."""
    high = (x + 128) >> 8
    tl.store(at, high.to(tl.int8))
    tl.store(at + at.shape[1], (x - 256 * high).to(tl.int8))


@triton.jit
def query_kernel(
    q, digits, factors,
    scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rotated queries of a KV head as integers, once for all its blocks of pages.

    q [B, HQ, D]; digits [B, H, 1 + BITS, BLOCK_G, 2, BLOCK_D] int8: for the mean in the order of channels, for
    each plane times its level and 2^-r, in the order of its operand: 4 c + r at r BLOCK_D / 4 + c; factors [B, HQ, 2]:
    what an integer stands for, and the sum of what those of the planes stand for.
    """
    h, b = tl.program_id(0), tl.program_id(1)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = (b * H + h) * G + g
    x = rotated_rows(q, head * D, g < G, D, WIDTH, BLOCK_D) * scale  # [BLOCK_G, BLOCK_D]
    unit = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) / _TOP
    x = x / unit[:, None]
    SIZE: tl.constexpr = 2 * BLOCK_G * BLOCK_D
    at = digits + (b * H + h) * ((1 + BITS) * SIZE) + g[:, None] * (2 * BLOCK_D)
    store_digits(at + d[None, :], rint(x).to(tl.int32))
    total = tl.zeros([BLOCK_G], tl.float32)
    power = (1 << d % 4).to(tl.float32)[None, :]
    for plane in tl.static_range(BITS):
        level = _ONE_BIT if BITS == 1 else (_FIRST if plane == 0 else _SECOND)
        y = rint(x * (level / power))
        total += tl.sum(y * power, axis=1)
        at += SIZE
        store_digits(at + (d % 4 * (BLOCK_D // 4) + d // 4)[None, :], y.to(tl.int32))
    tl.store(factors + 2 * head, unit, mask=g < G)
    tl.store(factors + 2 * head + 1, total * unit, mask=g < G)


@triton.jit
def joined(x):
    """The digits' sums side by side, [N, 2 BLOCK_G] int32 -> [N, BLOCK_G] float32."""
    high, low = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def plane_sums(words, digits, sums):
    """``sums`` [N, 2 BLOCK_G] and the digits of set bits, of the token in the low halves of all bytes.

    words: [N, W] int32, 16 channels each; digits [16 W, 2 BLOCK_G].
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    even = tl.join(words & 0x01010101, words & 0x04040404)
    x = tl.join(even, tl.join(words & 0x02020202, words & 0x08080808))
    x = tl.reshape(tl.permute(x, (0, 2, 3, 1)), (N, 4 * W))  # [N, r and word]
    # The bytes of a word, which is what stands in the register of an operand: no instruction is left of this.
    even = tl.join(x.to(tl.int8), (x >> 16).to(tl.int8))
    x = tl.join(even, tl.join((x >> 8).to(tl.int8), (x >> 24).to(tl.int8)))
    return tl.dot(tl.reshape(x, (N, 16 * W)), digits, sums, out_dtype=tl.int32)


@triton.jit
def byte_row_sums(words, here, first, second, D: tl.constexpr, BITS: tl.constexpr):
    """Sums of the tokens in the low and high halves of a row of bytes, which is D words before its second plane."""
    x = tl.load(words, mask=here, other=0)
    sums = tl.zeros([here.shape[0], first.shape[1]], tl.int32)
    low, high = plane_sums(x, first, sums), plane_sums(x >> 4, first, sums)
    if BITS == 2:
        x = tl.load(words + D, mask=here, other=0)
        low, high = plane_sums(x, second, low), plane_sums(x >> 4, second, high)
    return low, high


@triton.jit
def logits(sums, scale, base, unit, total):
    """Of one token, [N, BLOCK_G]: clear bits count as minus their digits. scale: a bfloat16 at the top of an int32."""
    x = joined(sums) * (2 * unit)[None, :] - total[None, :]
    return base + (scale & -65536).to(tl.float32, bitcast=True)[:, None] * x


@triton.jit
def rotated_sums_kernel(
    digits, factors, planes, means, scales, table, n_full, sums, block_top, block_mass,
    N, row_stride, part_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """u = log sum_t exp of the logits, for one block of pages and the G query heads of a KV head.

    Leaves the block's largest u and its sum of e^(u - largest) as `score.bounds_kernel` does. digits, factors: see
    `query_kernel`; planes [P, H, BITS, 16, D / 16] int32; means, scales: the stats [P, H, bytes] as int8 and int32.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = (b * H + h) * G + g  # row of [B * HQ]
    part = head * part_stride + block
    kept = g < G
    full = tl.minimum(tl.load(n_full + b), N)
    if block * BLOCK_N < full:
        # [BLOCK_N]
        page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
        offered = page >= 0
        row = page.to(tl.int64) * H + h
        BYTES: tl.constexpr = D + _STATS_BYTES
        SIZE: tl.constexpr = 2 * BLOCK_G * BLOCK_D
        d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 16)
        # [BLOCK_D, 2 BLOCK_G]
        of_mean = digits + (b * H + h) * ((1 + BITS) * SIZE)
        of_mean += tl.arange(0, 2 * BLOCK_G)[None, :] * BLOCK_D + d[:, None]
        first = tl.load(of_mean + SIZE)
        second = tl.load(of_mean + BITS * SIZE)
        unit = tl.load(factors + 2 * head, mask=kept, other=0.0)  # [BLOCK_G]
        total = tl.load(factors + 2 * head + 1, mask=kept, other=0.0)
        # [BLOCK_N, BLOCK_D]
        at_mean = means + row[:, None] * BYTES + d[None, :]
        mean = tl.load(at_mean, mask=offered[:, None] & (d < D)[None, :], other=0)
        at_scale = scales + row * (BYTES // 4) + D // 4
        step = tl.load(at_scale + 16, mask=offered, other=0).to(tl.float32, bitcast=True)
        base = joined(tl.dot(mean, tl.load(of_mean), out_dtype=tl.int32))  # [BLOCK_N, BLOCK_G]
        base = base * step[:, None] * unit[None, :]
        here = offered[:, None] & (w < D // 16)[None, :]
        at_words = planes + row[:, None] * (BITS * D) + w[None, :]
        top = tl.full([BLOCK_N, BLOCK_G], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
        for pair in tl.range(0, 8, num_stages=3):
            # Tokens j = 2 pair and j + 1, and those 16 behind them, whose bits are in the same bytes.
            near = tl.load(at_scale + pair, mask=offered, other=0)
            far = tl.load(at_scale + 8 + pair, mask=offered, other=0)
            words = at_words + pair * (D // 8)
            x0, x2 = byte_row_sums(words, here, first, second, D, BITS)
            x1, x3 = byte_row_sums(words + D // 16, here, first, second, D, BITS)
            x0 = logits(x0, near << 16, base, unit, total)
            x1 = logits(x1, near, base, unit, total)
            x2 = logits(x2, far << 16, base, unit, total)
            x3 = logits(x3, far, base, unit, total)
            largest = tl.maximum(top, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
            mass = mass * tl.exp2(top - largest) + tl.exp2(x0 - largest) + tl.exp2(x1 - largest)
            mass += tl.exp2(x2 - largest) + tl.exp2(x3 - largest)
            top = largest
        u = tl.where(offered[:, None], (top + tl.log2(mass)) * _LN_2, float("-inf"))
        at_sum = sums + head.to(tl.int64)[None, :] * row_stride + n[:, None]
        tl.store(at_sum, u, mask=kept[None, :])
        most = tl.max(u, axis=0)  # [BLOCK_G]
        tl.store(block_top + part, most, mask=kept)
        tl.store(block_mass + part, tl.sum(tl.exp(u - finite(most)[None, :]), axis=0), mask=kept)
    else:
        tl.store(block_top + part, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=kept)
        tl.store(block_mass + part, tl.zeros([BLOCK_G], tl.float32), mask=kept)


def _page_masses(q, planes, stats, table, n_full, scale):
    """What `rotated_sums_kernel` leaves."""
    (B, N), (_, H, bits), (HQ, D) = table.shape, planes.shape[:3], q.shape[1:]
    G, block_d = HQ // H, max(32, triton.next_power_of_2(D))
    block_g = max(8, triton.next_power_of_2(G))
    digits = q.new_empty((B, H, 1 + bits, block_g, 2, block_d), dtype=torch.int8)
    factors = q.new_empty((B, HQ, 2))
    query_kernel[(H, B)](
        q, digits, factors, scale * _LOG2_E, H, G, D, bits, D & -D, block_g, block_d, num_warps=4
    )
    scratch = Scratch.of(q, N, _BLOCK_PAGES)
    rotated_sums_kernel[(scratch.blocks, H, B)](
        digits, factors, planes.view(torch.int32), stats.view(torch.int8), stats.view(torch.int32), table,
        n_full, *scratch.tensors, N, *scratch.strides, H, G, D, bits, _BLOCK_PAGES, block_g, block_d,
        num_warps=4,
    )  # fmt: skip
    return scratch


def score_rotated(q, planes, stats, table, n_full, scale, reduce, out):
    """See `ops.rotated.score_rotated`."""
    if out is None:
        out = q.new_empty(table.shape)
    if table.numel() == 0:
        return out
    return _page_masses(q, planes, stats, table, n_full, scale).reduced(table, n_full, reduce, out)


def log_mass_rotated(q, planes, stats, pages, n_pages, scale):
    """See `ops.rotated.log_mass_rotated`."""
    if pages.numel() == 0:
        return q.new_full(q.shape[:2], float("-inf"))
    scratch = _page_masses(q, planes, stats, pages, n_pages, scale)
    _, top, mass = (x[..., : scratch.blocks] for x in scratch.tensors)
    return (top + mass.log()).logsumexp(-1)
