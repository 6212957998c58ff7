"""`score_rotated` on the device: one launch, and one for the query's digits where they are not given.

Memory traffic, with b bits: 4 D b + D + 112 bytes per page and KV head, and 8 per page for id and score. For the
intermediate buffers and the reduction over heads, see `score`.

Tensor cores consume the bits almost as stored. A word of a plane holds 16 channels of two tokens; one mask
leaves channels r, 4 + r, 8 + r and 12 + r of one of them as the bytes of an int8 operand, 0 or 2^r, so that a
key element costs a third of an instruction. The power of two is divided out of the query, which is rounded to
integers of at most 15 bits (12 for r = 3), i.e. two int8 digits: once per head, by the kernel that makes the query
(`predict.rotate_kernel`). A program processes several blocks of pages if there are more blocks than programs.
"""

import torch
import triton
import triton.language as tl

from ..rotated import FIRST, ONE_BIT, SECOND, STATS_BYTES, digits_bytes, operand_dim
from .attend import processors
from .rotate import _NORMS_AT, made_finite, rint, rotated
from .score import add_mass, between, parts_of, reduce_when_last, reduced_blocks

_FIRST, _SECOND, _ONE_BIT = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(ONE_BIT)
_STATS_BYTES = tl.constexpr(STATS_BYTES)
_TOP = tl.constexpr(127 * 256.0)  # range of two int8 digits
_LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634
_BLOCK_PAGES = 64  # M of one warp group's MMA


@triton.jit
def digits(x):
    """Integers |x| <= 127 * 256 as 256 a + b, both int8."""
    x = x.to(tl.int32)
    high = (x + 128) >> 8
    return high.to(tl.int8), (x - 256 * high).to(tl.int8)


@triton.jit
def query_numbers(q, D: tl.constexpr, BITS: tl.constexpr):
    """`ops.query_digits` before they are split: of the mean and each plane [M, D'], unit and total [M].

    q [M, D'] float32, 0 beyond D.
    """
    M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    d = tl.arange(0, BLOCK_D)
    x = rotated(q, d, D)
    unit = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) / _TOP
    x = x / unit[:, None]
    of_mean = rint(x)
    x = tl.reshape(tl.permute(tl.reshape(x, (M, BLOCK_D // 4, 4)), (0, 2, 1)), (M, BLOCK_D))
    power = (1 << d // (BLOCK_D // 4)).to(tl.float32)[None, :]
    first = rint(x * ((_ONE_BIT if BITS == 1 else _FIRST) / power))
    second, total = first, first * power
    if BITS == 2:
        second = rint(x * (_SECOND / power))
        total += second * power
    return of_mean, first, second, unit, tl.sum(total, axis=1) * unit


@triton.jit
def store_query_digits(q, to, D: tl.constexpr, BITS: tl.constexpr):
    """`ops.query_digits` of one head. q [1, D'] of any float type, 0 beyond D; to: int8, 16-byte aligned."""
    BLOCK_D: tl.constexpr = q.shape[1]
    OPERANDS: tl.constexpr = (1 + BITS) * BLOCK_D
    at = to + tl.arange(0, BLOCK_D)[None, :]
    of_mean, first, second, unit, total = query_numbers(made_finite(q, 0), D, BITS)
    for i in tl.static_range(0, 1 + BITS):
        high, low = digits(of_mean if i == 0 else (first if i == 1 else second))
        tl.store(at + i * BLOCK_D, high)
        tl.store(at + i * BLOCK_D + OPERANDS, low)
    numbers = (to + 2 * OPERANDS).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1)
    tl.store(numbers, unit)
    tl.store(numbers + 1, total)


@triton.jit
def query_digits_kernel(q, digits, D: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`store_query_digits` of one head. q [B * HQ, D]; digits [B * HQ, bytes] int8."""
    head, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    own = tl.load(q + head * D + d, mask=d < D, other=0.0)
    to = digits + head * (2 * (1 + BITS) * BLOCK_D + 16)
    store_query_digits(own[None, :], to, D, BITS)


@triton.jit
def joined(x):
    """Recombines the two digits' sums, [N, 2 BLOCK_G] int32 -> [N, BLOCK_G] float32."""
    high, low = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def plane_sums(words, query, sums):
    """``sums`` [N, 2 BLOCK_G] plus the digits at set bits, for the token in the low nibbles of all bytes.

    words: [N, W] int32, 16 channels each; query [16 W, 2 BLOCK_G].
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    even = tl.join(words & 0x01010101, words & 0x04040404)
    x = tl.join(even, tl.join(words & 0x02020202, words & 0x08080808))
    x = tl.reshape(tl.permute(x, (0, 2, 3, 1)), (N, 4 * W))  # [N, r and word]
    # The bytes of a word are already the operand register's layout: this compiles to no instructions.
    even = tl.join(x.to(tl.int8), (x >> 16).to(tl.int8))
    x = tl.join(even, tl.join((x >> 8).to(tl.int8), (x >> 24).to(tl.int8)))
    return tl.dot(tl.reshape(x, (N, 16 * W)), query, sums, out_dtype=tl.int32)


@triton.jit
def byte_row_sums(words, here, first, second, D: tl.constexpr, BITS: tl.constexpr):
    """Sums for the tokens in the low and high nibbles of a row of bytes; its second plane is D words further."""
    x = tl.load(words, mask=here, other=0)
    sums = tl.zeros([here.shape[0], first.shape[1]], tl.int32)
    low, high = plane_sums(x, first, sums), plane_sums(x >> 4, first, sums)
    if BITS == 2:
        x = tl.load(words + D, mask=here, other=0)
        low, high = plane_sums(x, second, low), plane_sums(x >> 4, second, high)
    return low, high


@triton.jit
def logits(sums, scale, base, unit, total):
    """Logits of a token, [N, BLOCK_G]; a clear bit counts as minus its digits. scale: bfloat16 in the upper 16 bits."""
    x = joined(sums) * (2 * unit)[None, :] - total[None, :]
    return base + (scale & -65536).to(tl.float32, bitcast=True)[:, None] * x


@triton.jit
def norms(pair):
    """Value norm of the token in the low byte, [BLOCK_N, 1], in steps."""
    return (pair & 255).to(tl.float32)[:, None]


@triton.jit
def block_sums(
    of_mean, first, second, unit, total, planes, means, scales, row, offered,
    D: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """u = log sum_t exp of the logits, [BLOCK_N, BLOCK_G], for the pages and KV head whose digests are at ``row``; and,
    with VALUES, the same with each token weighted by the norm of its value."""
    BLOCK_N: tl.constexpr = row.shape[0]
    BLOCK_G: tl.constexpr = unit.shape[0]
    BYTES: tl.constexpr = D + _STATS_BYTES
    d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 16)
    # [BLOCK_N, BLOCK_D]
    at_mean = means + row[:, None] * BYTES + d[None, :]
    mean = tl.load(at_mean, mask=offered[:, None] & (d < D)[None, :], other=0)
    at_scale = scales + row * (BYTES // 4) + D // 4
    at_norms = (means + row * BYTES + D + _NORMS_AT).to(tl.pointer_type(tl.int16))
    step = tl.load(at_scale + 16, mask=offered, other=0).to(tl.float32, bitcast=True)
    base = joined(tl.dot(mean, of_mean, out_dtype=tl.int32))  # [BLOCK_N, BLOCK_G]
    base = base * step[:, None] * unit[None, :]
    here = offered[:, None] & (w < D // 16)[None, :]
    at_words = planes + row[:, None] * (BITS * D) + w[None, :]
    top = tl.full([BLOCK_N, BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
    of_values = mass
    for pair in tl.range(0, 8, num_stages=3):
        # Tokens j = 2 pair and j + 1, and j + 16 and j + 17, whose bits are in the same bytes.
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
        kept = tl.exp2(top - largest)
        x0, x1 = tl.exp2(x0 - largest), tl.exp2(x1 - largest)
        x2, x3 = tl.exp2(x2 - largest), tl.exp2(x3 - largest)
        mass = mass * kept + x0 + x1 + x2 + x3
        top = largest
        if VALUES:
            at_norm = at_norms + pair
            near = tl.load(at_norm, mask=offered, other=0).to(tl.int32)
            far = tl.load(at_norm + 8, mask=offered, other=0).to(tl.int32)
            of_values = of_values * kept + x0 * norms(near) + x1 * norms(near >> 8)
            of_values += x2 * norms(far) + x3 * norms(far >> 8)
    u = tl.where(offered[:, None], (top + tl.log2(mass)) * _LN_2, float("-inf"))
    if VALUES:
        step = tl.load(at_scale + 17, mask=offered, other=0).to(tl.float32, bitcast=True)
        of_values = (top + tl.log2(of_values * step[:, None])) * _LN_2
        return u, tl.where(offered[:, None], of_values, float("-inf"))
    else:
        return u, u


@triton.jit(do_not_specialize=["parts"])  # one part would take another third of registers
def rotated_sums_kernel(
    digits, planes, means, scales, table, n_full, arrivals, sums, tops, masses, out,
    scale, N, row_stride, parts,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    REDUCE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`block_sums` of every parts-th block of pages for the G query heads of one KV head, like `score.bounds_kernel`.
    For "mass" the sums are weighted by value norms, but normalized by the unweighted mass.

    digits: `ops.query_digits`, as int8; planes [P, H, BITS, 16, D / 16] int32; means, scales: the stats
    [P, H, bytes] as int8 and int32.
    """
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    head = (b * H + h) * G + g  # row of [B * HQ]
    full = tl.minimum(tl.load(n_full + b), N)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    if part * BLOCK_N < full:
        BYTES: tl.constexpr = 2 * (1 + BITS) * BLOCK_D + 16
        i = tl.arange(0, 2 * BLOCK_G)
        at = digits + ((b * H + h) * G + i // 2) * BYTES + i % 2 * ((1 + BITS) * BLOCK_D)
        at = at[:, None] + tl.arange(0, BLOCK_D)[None, :]
        # [BLOCK_D, 2 BLOCK_G]: each query's two digits
        of_mean = tl.trans(tl.load(at, mask=(i < 2 * G)[:, None], other=0))
        first = tl.trans(tl.load(at + BLOCK_D, mask=(i < 2 * G)[:, None], other=0))
        second = first
        if BITS == 2:
            second = tl.trans(tl.load(at + 2 * BLOCK_D, mask=(i < 2 * G)[:, None], other=0))
        numbers = (digits + head * BYTES + BYTES - 16).to(tl.pointer_type(tl.float32))
        unit = tl.load(numbers, mask=g < G, other=0.0) * scale
        total = tl.load(numbers + 1, mask=g < G, other=0.0) * scale
        for block in range(part, tl.cdiv(full, BLOCK_N), parts):
            # [BLOCK_N]
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
            # [BLOCK_N, BLOCK_G]
            u, of_values = block_sums(
                of_mean, first, second, unit, total, planes, means, scales,
                page.to(tl.int64) * H + h, page >= 0, D, BITS, BLOCK_D, REDUCE == "mass",
            )  # fmt: skip
            at_sum = sums + head.to(tl.int64)[None, :] * row_stride + n[:, None]
            tl.store(at_sum, of_values, mask=(g < G)[None, :])
            top, mass = add_mass(top, mass, u, 0)
    tl.store(tops + head * parts + part, top, mask=g < G)
    tl.store(masses + head * parts + part, mass, mask=g < G)
    reduce_when_last(
        arrivals, sums, tops, masses, table, out, b, full, N, row_stride, parts,
        H, H * G, REDUCE, BLOCK_H, BLOCK_R,
    )  # fmt: skip


def programs_per_sm(block_d: int) -> int:
    """Of `rotated_sums_kernel`, whose registers are limited accordingly; a few more and an SM would hold one less."""
    return 4 if block_d <= 128 else 2


def score_rotated(q, planes, stats, table, n_full, scale, reduce, out, arrivals, digits, every):
    """See `ops.rotated.score_rotated`."""
    if out is None:
        out = q.new_empty(table.shape, dtype=torch.float32)
    if table.numel() == 0:
        return out
    if arrivals is None:
        arrivals = n_full.new_zeros(len(table))
    (B, N), (_, H, bits), (HQ, D) = table.shape, planes.shape[:3], q.shape[1:]
    G, block_d = HQ // H, operand_dim(D)
    if digits is None:
        digits = q.new_empty((B, HQ, digits_bytes(bits, D)), dtype=torch.uint8)
        query_digits_kernel[(B * HQ,)](q, digits.view(torch.int8), D, bits, block_d, num_warps=1)
    per_sm = programs_per_sm(block_d)
    slots = per_sm * processors(table.device)
    parts = parts_of(triton.cdiv(B, every) * H, triton.cdiv(N, _BLOCK_PAGES), slots)
    sums, tops, masses = between(q, N, parts, _BLOCK_PAGES)
    rotated_sums_kernel[(parts, H, B)](
        digits.view(torch.int8), planes.view(torch.int32), stats.view(torch.int8),
        stats.view(torch.int32), table, n_full, arrivals, sums, tops, masses, out,
        scale * LOG2_E, N, sums.shape[2], parts,
        H, G, D, bits, reduce, _BLOCK_PAGES, max(8, triton.next_power_of_2(G)), block_d,
        *reduced_blocks(HQ, N), num_warps=4, maxnreg=512 // per_sm,
    )  # fmt: skip
    return out
