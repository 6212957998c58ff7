"""`score_signs` on the device.

Bytes that must move: 2 H D e per offered page and row and 8 for id and score. Between its two passes
lie 4 HQ bytes per page and 16 HQ per block of pages, as in `score`.

A query is a vector of real numbers, so counting equal bits does not score it: each bit adds +q or -q.
A bit at place 14 of a float16 is 2.0, so that two instructions make the bits of two channels an
operand of the tensor cores, which stays in registers; u = (what set bits add, doubled) - sum q.
"""

import torch
import triton
import triton.language as tl

from ..signs import LEAST_SPREAD, WORD_TOKENS

_WORD_TOKENS = tl.constexpr(WORD_TOKENS)
_TOP_EXPONENT = tl.constexpr(127 + 14)  # of the largest |q| of a head, once scaled
_BLOCK_PAGES = 64  # the rows of one warp group's product
_BLOCK_HEADS = 16  # of the second pass at once: it holds numbers of all blocks for each


@triton.jit
def query_parts(q, head, kept, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """The queries of a group as two float16 parts side by side, [BLOCK_D, 2 BLOCK_G], and their sums
    over the channels, [BLOCK_G].

    A head's scores are taken in units of their own deviation, so a factor does not matter: one that
    is a power of two brings its largest element near the top of float16, and two parts then hold 22
    bits of all elements within 2^-17 of it.
    """
    d = tl.arange(0, BLOCK_D)
    # [BLOCK_D, BLOCK_G]
    x = tl.load(
        q + head[None, :] * D + d[:, None], mask=kept[None, :] & (d < D)[:, None], other=0.0
    )
    size = tl.max(tl.abs(x), axis=0)
    exponent = (size.to(tl.int32, bitcast=True) >> 23) & 0xFF
    factor = (tl.minimum(127 + _TOP_EXPONENT - exponent, 254) << 23).to(tl.float32, bitcast=True)
    x = x * factor[None, :]
    upper = x.to(tl.float16)  # [BLOCK_D, BLOCK_G]
    lower = (x - upper.to(tl.float32)).to(tl.float16)
    total = tl.sum(upper.to(tl.float32) + lower.to(tl.float32), axis=0)
    parts = tl.permute(tl.join(upper, lower), (0, 2, 1))
    return tl.reshape(parts, (BLOCK_D, 2 * BLOCK_G)), total


@triton.jit
def word_pairs(words, row, offered, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_N, BLOCK_D / 2] int32: the words of two neighbouring channels of page ``row``.

    words: [P, H, D / 2] int32 that hold such pairs, or [P, H, D] int64 with a word in each half.
    """
    d = tl.arange(0, BLOCK_D // 2)
    at = row[:, None] * (D // 2) + d[None, :]
    # [BLOCK_N, BLOCK_D / 2]
    pair = tl.load(words + at, mask=offered[:, None] & (d < D // 2)[None, :], other=0)
    if words.dtype.element_ty == tl.int64:
        pair = pair | (pair >> 16)
    return pair.to(tl.int32)


@triton.jit
def token_sums(bits, parts):
    """[BLOCK_N, BLOCK_G]: 2 q added up where ``bits`` [BLOCK_N, BLOCK_D / 2] have 2.0 for a channel.

    parts: see `query_parts`.
    """
    BLOCK_N: tl.constexpr = bits.shape[0]
    pair = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
    operand = tl.reshape(pair, (BLOCK_N, parts.shape[0])).to(
        tl.float16, bitcast=True
    )  # [BLOCK_N, BLOCK_D]
    return tl.sum(tl.reshape(tl.dot(operand, parts), (BLOCK_N, 2, parts.shape[1] // 2)), axis=1)


@triton.jit
def sign_sums_kernel(
    q, low, high, table, n_full, sums, counts, means, squares, largest,
    N, row_stride, part_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """u = max over the tokens of sum +-q, for one block of pages and the G query heads of a KV head.

    Also leaves what the second pass needs of the block: how many pages, their mean u, the sum of
    squares about it, and the largest |u|. A block past n_full has no pages and writes only these.

    q [B, HQ, D]; low, high: see `word_pairs`; table [B, N]; sums [B, HQ, row_stride]; counts, means,
    squares, largest [B, HQ, part_stride].
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = (b * H + h) * G + g  # row of [B * HQ]
    part = head * part_stride + block
    kept = g < G
    full = tl.minimum(tl.load(n_full + b), N)
    count = tl.zeros([BLOCK_G], tl.float32)
    mean, square, size = count, count, count
    if block * BLOCK_N < full:
        # [BLOCK_N]
        page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
        offered = page >= 0
        parts, total = query_parts(q, head, kept, D, BLOCK_G, BLOCK_D)
        u = tl.full([BLOCK_N, BLOCK_G], float("-inf"), tl.float32)
        for half in tl.static_range(2):
            # [BLOCK_N, BLOCK_D / 2] words, [BLOCK_N, BLOCK_G] sums
            pair = word_pairs(
                low if half == 0 else high, page.to(tl.int64) * H + h, offered, D, BLOCK_D
            )
            # From place t of each half to place 14. Not a shift but a product, which runs beside the
            # mask on another pipe. The tokens are a loop: unrolled, they take twice the registers.
            u = tl.maximum(u, token_sums((pair >> 1) & 0x40004000, parts))
            place = 1 << 14
            for _ in range(_WORD_TOKENS - 1):
                u = tl.maximum(u, token_sums((pair * place) & 0x40004000, parts))
                place = place >> 1
        # Clear bits count as -q.
        u = u - total[None, :]
        at = sums + head.to(tl.int64)[None, :] * row_stride + n[:, None]
        tl.store(at, u, mask=kept[None, :])
        here = offered[:, None]
        count += tl.sum(offered.to(tl.float32), axis=0)
        mean = tl.sum(tl.where(here, u, 0.0), axis=0) / tl.maximum(count, 1.0)  # [BLOCK_G]
        off = tl.where(here, u - mean[None, :], 0.0)
        square = tl.sum(off * off, axis=0)
        size = tl.max(tl.where(here, tl.abs(u), 0.0), axis=0)
    tl.store(counts + part, count, mask=kept)
    tl.store(means + part, mean, mask=kept)
    tl.store(squares + part, square, mask=kept)
    tl.store(largest + part, size, mask=kept)


@triton.jit
def stand_out_kernel(
    sums, counts, means, squares, largest, table, n_full, out,
    N, row_stride, part_stride, blocks,
    LEAST_SPREAD: tl.constexpr, HQ: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scores of one block of pages: u of each head in units of its deviation, and the largest of all.

    Blocks are combined by their counts, means and squares (Chan, Golub and LeVeque 1979). out: [B, N].
    """
    block, b = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    full = tl.minimum(tl.load(n_full + b), N)
    row = b.to(tl.int64) * N
    if block * BLOCK_N < full:
        # [BLOCK_N]
        offered = tl.load(table + row + n, mask=n < full, other=-1) >= 0
        part = tl.arange(0, BLOCK_BLOCKS)
        score = tl.full([BLOCK_N], float("-inf"), tl.float32)
        for first in range(0, HQ, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            head = (b * HQ + h).to(tl.int64)
            at = head[:, None] * part_stride + part[None, :]
            known = (h < HQ)[:, None] & (part < blocks)[None, :]
            # [BLOCK_H, BLOCK_BLOCKS]
            count = tl.load(counts + at, mask=known, other=0.0)
            each = tl.load(means + at, mask=known, other=0.0)
            total = tl.maximum(tl.sum(count, axis=1), 1.0)  # [BLOCK_H]
            mean = tl.sum(count * each, axis=1) / total
            off = each - mean[:, None]
            square = tl.load(squares + at, mask=known, other=0.0) + count * off * off
            spread = tl.sqrt(tl.sum(square, axis=1) / total)
            size = tl.max(tl.load(largest + at, mask=known, other=0.0), axis=1)
            # What is left of equal sums is rounding.
            differs = spread > LEAST_SPREAD * size
            unit = tl.where(differs, 1.0 / tl.where(differs, spread, 1.0), 0.0)
            mask = (h < HQ)[:, None] & offered[None, :]
            # [BLOCK_H, BLOCK_N]
            u = tl.load(sums + head[:, None] * row_stride + n[None, :], mask=mask, other=0.0)
            u = tl.where(mask, (u - mean[:, None]) * unit[:, None], float("-inf"))
            score = tl.maximum(score, tl.max(u, axis=0))
        tl.store(out + row + n, tl.where(offered, score, float("-inf")), mask=n < N)
    else:
        tl.store(out + row + n, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=n < N)


def score_signs(q, low, high, table, n_full, out):
    """See `ops.signs.score_signs`."""
    (B, N), (_, H, D), HQ = table.shape, low.shape, q.shape[1]
    if out is None:
        out = q.new_empty((B, N))
    if B * N == 0:
        return out
    G = HQ // H
    block_n = min(_BLOCK_PAGES, max(16, triton.next_power_of_2(N)))
    blocks = triton.cdiv(N, block_n)
    row_stride = blocks * block_n
    sums = q.new_empty((B, HQ, row_stride))
    part_stride = 16 * triton.cdiv(blocks, 16)  # as in `score.score_pages`
    of_blocks = q.new_empty((4, B, HQ, part_stride)).unbind()
    pairs = {2: torch.int32, 4: torch.int64}[low.element_size()]
    sign_sums_kernel[(blocks, H, B)](
        q, low.view(pairs), high.view(pairs), table, n_full, sums, *of_blocks, N, row_stride, part_stride,
        H, G, D, block_n, max(8, triton.next_power_of_2(G)), triton.next_power_of_2(D), num_warps=4,
    )  # fmt: skip
    stand_out_kernel[(blocks, B)](
        sums, *of_blocks, table, n_full, out, N, row_stride, part_stride, blocks, LEAST_SPREAD, HQ, block_n,
        min(_BLOCK_HEADS, triton.next_power_of_2(HQ)), triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    return out
