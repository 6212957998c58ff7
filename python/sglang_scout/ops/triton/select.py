"""`select_pages` on the device: one program per row. At 4,096 pages 32 KiB move: what counts is the number of dependent
steps, up to 6 histograms of the row (as a rule 4, for 24 bits), one prefix sum, one pass over the chosen."""

import torch
import triton
import triton.language as tl

from ..select import Selection

_LANE_KEYS = 8  # keys that a thread holds
# Two bins of a histogram per thread of a warp: few instructions a key.
_DIGIT_BITS = tl.constexpr(6)
_DIGITS = tl.constexpr(64)


@triton.jit
def ordered_bits(x):
    """uint32 in the order of the float32 x, none of them 0 or 2^32 - 1; a NaN comes last."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, -0x00800001, bits)  # the lowest finite number
    bits = tl.where(bits == -0x00800000, -0x00800001, bits)  # -inf as well
    bits = tl.where(bits == 0x7F800000, 0x7F7FFFFF, bits)  # inf as the largest finite number
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def select_kernel(
    scores, table, n_full, slot_of, scratch, pages, missing, n_missing,
    N, k, sink_pages, recent_pages,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK_K: tl.constexpr,
):
    """The k best pages of a row, forced ones first, then by falling score, equal ones by column.

    1. Every column gets a key: 0 if it is not offered, the largest if it is forced.
    2. The k-th largest key is found by its digits from the first on, or as many as tell it from the next: a histogram
       of the keys that begin like it says what its next digit is.
    3. A prefix sum numbers the columns above it and, after them, as many equal ones as fit; their (key, column) goes to
       the scratch row [BLOCK_K].
    4. The rank of a chosen page, among all and among the missing ones, is how many are before it; it is written to
       these places.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    full = tl.minimum(tl.load(n_full + b), N)
    # [BLOCK_N]
    page = tl.load(table + b * N + n, mask=n < N, other=-1)
    score = tl.load(scores + b * N + n, mask=n < N, other=0.0)
    key = ordered_bits(score)
    forced = (n < sink_pages) | (n >= full - recent_pages)
    key = tl.where(forced, tl.full([BLOCK_N], 0xFFFFFFFF, tl.uint32), key)
    offered = (page >= 0) & (n < full)
    key = tl.where(offered, key, tl.zeros([BLOCK_N], tl.uint32))

    bar = tl.zeros([], tl.uint32)
    n_above = tl.zeros([], tl.int32)  # keys that begin with larger digits
    at_bar = tl.where(full <= k, k, BLOCK_N)  # keys that are not below it
    digits = tl.arange(0, _DIGITS)
    shift = tl.full([], 32 - _DIGIT_BITS, tl.int32)
    span = tl.full([], _DIGITS, tl.int32)
    # Once k keys are left, these are the k largest, whatever the lower bits of the k-th are.
    while (span > 0) & (at_bar != k):
        digit = (key - bar) >> shift.to(tl.uint32)  # beyond the span where a key begins otherwise
        counts = tl.histogram(digit.to(tl.int32), _DIGITS, mask=digit < span)
        least = n_above + tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        found = tl.sum((least >= k).to(tl.int32), axis=0) - 1
        both = tl.sum(tl.where(digits == found, (least << 16) + counts, 0), axis=0)
        at_bar = both >> 16
        n_above = at_bar - (both & 0xFFFF)
        bar += found.to(tl.uint32) << shift.to(tl.uint32)
        span = tl.where(shift >= _DIGIT_BITS, _DIGITS, tl.where(shift > 0, 4, 0))
        shift = tl.maximum(shift - _DIGIT_BITS, 0)

    above = key > bar
    equal = (key == bar) & (key > 0)
    number = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    n_above = tl.sum(above.to(tl.int32), axis=0)
    place = tl.where(above, (number & 0xFFFF) - 1, n_above + (number >> 16) - 1)
    # The column from the right in the low half: of equal keys the first column is the larger.
    packed = (key.to(tl.int64) << 24) | (BLOCK_N - 1 - n).to(tl.int64)
    tl.store(scratch + b * BLOCK_K + place, packed, mask=(above | equal) & (place < k))
    n_chosen = tl.minimum(tl.sum((above | equal).to(tl.int32), axis=0), k)
    tl.debug_barrier()  # what other threads of this program stored is read below

    i = tl.arange(0, BLOCK_K)
    # [BLOCK_K]
    mine = tl.load(scratch + b * BLOCK_K + i, mask=i < n_chosen, other=-1)
    column = BLOCK_N - 1 - (mine & 0xFFFFFF).to(tl.int32)
    my_page = tl.load(table + b * N + column, mask=i < n_chosen, other=-1)
    lacks_slot = tl.load(slot_of + my_page, mask=i < n_chosen, other=0) < 0
    rank = tl.zeros([BLOCK_K], tl.int32)
    missing_rank = tl.zeros([BLOCK_K], tl.int32)
    for first in tl.range(0, n_chosen, CHUNK_K):
        j = first + tl.arange(0, CHUNK_K)
        # [CHUNK_K]
        other = tl.load(scratch + b * BLOCK_K + j, mask=j < n_chosen, other=-1)
        other_column = BLOCK_N - 1 - (other & 0xFFFFFF).to(tl.int32)
        other_page = tl.load(table + b * N + other_column, mask=j < n_chosen, other=-1)
        other_lacks = tl.load(slot_of + other_page, mask=j < n_chosen, other=0) < 0
        # [BLOCK_K, CHUNK_K]
        before = other[None, :] > mine[:, None]
        rank += tl.sum(before.to(tl.int32), axis=1)
        missing_rank += tl.sum((before & other_lacks[None, :]).to(tl.int32), axis=1)
    count = tl.sum(lacks_slot.to(tl.int32), axis=0)
    row = b * k
    tl.store(pages + row + rank, my_page, mask=i < n_chosen)
    tl.store(missing + row + missing_rank, my_page, mask=lacks_slot)
    void = tl.full([BLOCK_K], -1, tl.int32)
    tl.store(pages + row + i, void, mask=(i >= n_chosen) & (i < k))
    tl.store(missing + row + i, void, mask=(i >= count) & (i < k))
    tl.store(n_missing + b, count)


def select_pages(scores, table, n_full, slot_of, k, sink_pages, recent_pages, out=None):
    B, N = table.shape
    pages, missing = out if out is not None else table.new_empty((2, B, k)).unbind()
    n_missing = table.new_empty(B)
    block_n = max(16, triton.next_power_of_2(N))
    block_k = max(16, triton.next_power_of_2(k))
    select_kernel[(B,)](
        scores, table, n_full, slot_of, table.new_empty((B, block_k), dtype=torch.int64),
        pages, missing, n_missing, N, k, sink_pages, recent_pages, block_n, block_k,
        max(16, min(block_k, 64, 8192 // block_k)),
        num_warps=min(16, max(4, block_n // (32 * _LANE_KEYS))),
    )
    return Selection(pages, missing, n_missing)
