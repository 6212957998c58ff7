"""`score_rotated` on the device: one launch for the queries, one for the pages; and `mass_change_rotated`: one launch.

Tensor cores consume the bits almost as stored. A word of a plane holds 16 channels of two tokens; one mask
leaves channels r, 4 + r, 8 + r and 12 + r of one of them as the bytes of an int8 operand, 0 or 2^r, so that a
key element costs a third of an instruction. The power of two is divided out of the query, which is rounded to
integers of at most 15 bits (12 for r = 3), i.e. two int8 digits, once for all programs that read them.
"""

import torch
import triton
import triton.language as tl

from ..rotated import STATS_BYTES
from .attend import processors
from .rotated import NORMS_AT, heads_of, query_digits, query_digits_kernel, width_of
from .score import add_mass, parts_of, reduce_when_last, reduced_pages, reduction

_STATS_BYTES = tl.constexpr(STATS_BYTES)
_LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634
_BLOCK_PAGES = 64  # M of one warp group's MMA
_MASS_BLOCK_PAGES = tl.constexpr(16)  # small, as few pages are missing


@triton.jit
def joined(x):
    """Recombines the two digits' sums, [N, 2 BLOCK_G] int32 -> [N, BLOCK_G] float32."""
    high, low = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def plane_sums(words, query, sums):
    """``sums`` [N, 2 BLOCK_G] plus the digits at set bits, for the token in the low nibbles of all bytes of ``words``
    [N, W] int32, 16 channels each. query [2 BLOCK_G, 16 W]."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    even = tl.join(words & 0x01010101, words & 0x04040404)
    x = tl.join(even, tl.join(words & 0x02020202, words & 0x08080808))
    x = tl.reshape(tl.permute(x, (0, 2, 3, 1)), (N, 4 * W))  # [N, r and word]
    # The bytes of a word are already the operand register's layout: this compiles to no instructions.
    even = tl.join(x.to(tl.int8), (x >> 16).to(tl.int8))
    x = tl.join(even, tl.join((x >> 8).to(tl.int8), (x >> 24).to(tl.int8)))
    return tl.dot(tl.reshape(x, (N, 16 * W)), tl.trans(query), sums, out_dtype=tl.int32)


@triton.jit
def byte_row_sums(words, here, first, second, D: tl.constexpr):
    """Sums for the tokens in the low and high nibbles of a row of bytes; the second plane is D words further."""
    x = tl.load(words, mask=here, other=0)
    sums = tl.zeros([here.shape[0], first.shape[0]], tl.int32)
    low, high = plane_sums(x, first, sums), plane_sums(x >> 4, first, sums)
    x = tl.load(words + D, mask=here, other=0)
    return plane_sums(x, second, low), plane_sums(x >> 4, second, high)


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
    D: tl.constexpr, VALUES: tl.constexpr,
):
    """u = log sum_t exp of the logits, [BLOCK_N, BLOCK_G], for the pages and KV head whose digests are at ``row``; and,
    with VALUES, the same with each token weighted by the norm of its value."""
    BLOCK_N: tl.constexpr = row.shape[0]
    BLOCK_G: tl.constexpr = unit.shape[0]
    BYTES: tl.constexpr = D + _STATS_BYTES
    d, w = tl.arange(0, width_of(D)), tl.arange(0, width_of(D) // 16)
    # [BLOCK_N, BLOCK_D]
    at_mean = means + row[:, None] * BYTES + d[None, :]
    mean = tl.load(at_mean, mask=offered[:, None] & (d < D)[None, :], other=0)
    at_scale = scales + row * (BYTES // 4) + D // 4
    at_norms = (means + row * BYTES + D + NORMS_AT).to(tl.pointer_type(tl.int16))
    step = tl.load(at_scale + 16, mask=offered, other=0).to(tl.float32, bitcast=True)
    base = joined(tl.dot(mean, tl.trans(of_mean), out_dtype=tl.int32))  # [BLOCK_N, BLOCK_G]
    base = base * step[:, None] * unit[None, :]
    here = offered[:, None] & (w < D // 16)[None, :]
    at_words = planes + row[:, None] * (2 * D) + w[None, :]
    top = tl.full([BLOCK_N, BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
    of_values = mass
    for pair in tl.range(0, 8, num_stages=3):
        # Tokens j = 2 pair and j + 1, and j + 16 and j + 17, whose bits are in the same bytes.
        near = tl.load(at_scale + pair, mask=offered, other=0)
        far = tl.load(at_scale + 8 + pair, mask=offered, other=0)
        words = at_words + pair * (D // 8)
        x0, x2 = byte_row_sums(words, here, first, second, D)
        x1, x3 = byte_row_sums(words + D // 16, here, first, second, D)
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
    digits_of, numbers, planes, means, scales, table, n_full, arrivals, sums, tops, masses, out,
    N, row_stride, parts,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """`block_sums` of every parts-th block of pages for the G query heads of one KV head, like `score.bounds_kernel`.
    The sums are weighted by value norms, but normalized by the unweighted mass. digits_of, numbers: see
    `query_digits_kernel`; planes [P, H, 2, 16, D / 16] int32; means, scales: the stats as int8 and int32."""
    BLOCK_G: tl.constexpr = heads_of(G)
    BLOCK_D: tl.constexpr = width_of(D)
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    head = (b * H + h) * G + g  # row of [B * HQ]
    full = tl.minimum(tl.load(n_full + b), N)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    if part * BLOCK_N < full:
        i, d = tl.arange(0, 2 * BLOCK_G), tl.arange(0, BLOCK_D)
        at = (2 * (b * H + h) * G + i)[:, None] * (3 * BLOCK_D) + d[None, :]
        mine = (i < 2 * G)[:, None] & (d >= 0)[None, :]
        of_mean = tl.load(digits_of + at, mask=mine, other=0)
        first = tl.load(digits_of + at + BLOCK_D, mask=mine, other=0)
        second = tl.load(digits_of + at + 2 * BLOCK_D, mask=mine, other=0)
        heads = tl.num_programs(2) * H * G
        unit = tl.load(numbers + head, mask=g < G, other=0.0)
        total = tl.load(numbers + heads + head, mask=g < G, other=0.0)
        for block in range(part, tl.cdiv(full, BLOCK_N), parts):
            # [BLOCK_N]
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
            # [BLOCK_N, BLOCK_G]
            u, of_values = block_sums(
                of_mean, first, second, unit, total, planes, means, scales,
                page.to(tl.int64) * H + h, page >= 0, D, True,
            )
            at_sum = sums + head.to(tl.int64)[None, :] * row_stride + n[:, None]
            tl.store(at_sum, of_values, mask=(g < G)[None, :])
            top, mass = add_mass(top, mass, u, 0)
    tl.store(tops + head * parts + part, top, mask=g < G)
    tl.store(masses + head * parts + part, mass, mask=g < G)
    reduce_when_last(
        arrivals, sums, tops, masses, table, out, b, full, N, row_stride, parts, H, H * G, BLOCK_R
    )


def programs_per_sm(D: int) -> int:
    """Of `rotated_sums_kernel`, whose registers are limited accordingly; a few more and an SM would hold one less."""
    return 4 if D <= 128 else 2


def score_rotated(q, planes, stats, table, n_full, scale):
    if table.numel() == 0:
        return q.new_empty(table.shape, dtype=torch.float32)
    (B, N), H, (HQ, D) = table.shape, planes.shape[1], q.shape[1:]
    digits_of = q.new_empty((B, HQ, 2, 3, width_of(D)), dtype=torch.int8)
    numbers = q.new_empty((2, B, HQ), dtype=torch.float32)
    query_digits_kernel[(H, B)](q, digits_of, numbers, scale * LOG2_E, HQ // H, D, num_warps=4)
    per_sm = programs_per_sm(D)
    parts = parts_of(B * H, triton.cdiv(N, _BLOCK_PAGES), per_sm * processors(table.device))
    buffers = reduction(q, table, parts, _BLOCK_PAGES)
    rotated_sums_kernel[(parts, H, B)](
        digits_of, numbers, planes.view(torch.int32), stats.view(torch.int8), stats.view(torch.int32),
        table, n_full, *buffers, N, buffers[1].shape[2], parts,
        H, HQ // H, D, _BLOCK_PAGES, reduced_pages(N), num_warps=4, maxnreg=512 // per_sm,
    )
    return buffers[-1]


@triton.jit
def mass_kernel(
    q, q_ahead, planes, means, scales, pages, n_pages, change,
    scale, N,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
):
    """The G query heads of one KV head. The real and the predicted queries are rows of one operand, so that every
    digest is read once. planes, means, scales: see `rotated_sums_kernel`."""
    BLOCK_G: tl.constexpr = heads_of(G)
    h, b = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, BLOCK_G)
    head = (b * H + h) * G + g
    of = b * C + h % C
    count = tl.minimum(tl.load(n_pages + of), N)
    differ = tl.zeros([BLOCK_G], tl.float32)
    if count > 0:
        i = tl.arange(0, 2 * BLOCK_G)
        of_group = i % BLOCK_G
        to_ahead = q_ahead.to(tl.int64) - q.to(tl.int64)
        to_ahead = to_ahead // (q.dtype.element_ty.primitive_bitwidth // 8)
        row = ((b * H + h) * G + of_group) * D + tl.where(i < BLOCK_G, 0, to_ahead)
        of_mean, first, second, unit, total = query_digits(q, row, of_group < G, scale, D)
        top = tl.full([2 * BLOCK_G], float("-inf"), tl.float32)
        mass = tl.zeros([2 * BLOCK_G], tl.float32)
        for begin in range(0, count, _MASS_BLOCK_PAGES):
            n = begin + tl.arange(0, _MASS_BLOCK_PAGES)
            # [BLOCK_N]
            page = tl.load(pages + of.to(tl.int64) * N + n, mask=n < count, other=-1)
            # [BLOCK_N, 2 BLOCK_G]
            u, _ = block_sums(
                of_mean, first, second, unit, total, planes, means, scales,
                page.to(tl.int64) * H + h, page >= 0, D, False,
            )
            top, mass = add_mass(top, mass, u, 0)
        both = tl.reshape(top + tl.log(mass), (2, BLOCK_G))
        real, ahead = tl.split(tl.trans(both))
        differ = real - ahead
        differ = tl.where(tl.abs(differ) < float("inf"), differ, 0.0)
    tl.store(change + head, differ, mask=g < G)


def mass_change_rotated(q, q_ahead, planes, stats, pages, n_pages, scale):
    (B, HQ, D), H = q.shape, planes.shape[1]
    change = q.new_empty((B, HQ), dtype=torch.float32)
    if B == 0:
        return change
    mass_kernel[(H, B)](
        q, q_ahead, planes.view(torch.int32), stats.view(torch.int8), stats.view(torch.int32),
        pages, n_pages, change, scale * LOG2_E, pages.shape[1],
        H, HQ // H, D, len(pages) // B, num_warps=4,
    )
    return change
