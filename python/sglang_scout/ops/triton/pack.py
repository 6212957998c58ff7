"""`pack_pages` on the device: one program per row.

Memory traffic: 4 bytes for each page id, 4 for its slot if it has to be looked up, and 4 written.
"""

import triton
import triton.language as tl

_MAX_CHUNK = 1024  # ids processed per iteration


@triton.jit
def pack_kernel(
    pages, last_page, last_len, slot_of, n_pages, table, lengths,
    R, S, ids,
    HAS_SLOTS: tl.constexpr, HAS_LAST: tl.constexpr, HAS_COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """pages [B, R]; slot_of [ids]; table [B, R + 1]; the others [B]."""
    b = tl.program_id(0)
    row = table + b.to(tl.int64) * (R + 1)
    own = R
    if HAS_COUNT:
        own = tl.minimum(tl.load(n_pages + b), R)
    count = 0
    for first in range(0, own, CHUNK):
        column = first + tl.arange(0, CHUNK)
        # [CHUNK]
        page = tl.load(pages + b.to(tl.int64) * R + column, mask=column < own, other=-1)
        if HAS_SLOTS:
            page = tl.load(slot_of + page, mask=(page >= 0) & (page < ids), other=-1)
        rank = tl.cumsum((page >= 0).to(tl.int32), axis=0)  # 1 for the first page
        tl.store(row + count + rank - 1, page, mask=page >= 0)
        count += tl.max(rank, axis=0)
    length = count * S
    if HAS_LAST:
        tail = tl.load(last_page + b)
        if tail >= 0:
            tl.store(row + count, tail)
            length += tl.load(last_len + b)
            count += 1
    for first in range(0, R + 1, CHUNK):
        column = first + tl.arange(0, CHUNK)
        tl.store(row + column, tl.zeros([CHUNK], tl.int32), mask=(column >= count) & (column <= R))
    tl.store(lengths + b, length)


def pack_pages(pages, last_page, last_len, page_tokens, slot_of, n_pages):
    """See `ops.pack.pack_pages`."""
    B, R = pages.shape
    table, lengths = pages.new_empty((B, R + 1)), pages.new_empty(B)
    if B == 0:
        return table, lengths
    chunk = max(16, min(_MAX_CHUNK, triton.next_power_of_2(R + 1)))
    pack_kernel[(B,)](
        pages, last_page, last_len, slot_of, n_pages, table, lengths, R, page_tokens,
        0 if slot_of is None else slot_of.numel(), slot_of is not None, last_page is not None,
        n_pages is not None, chunk, num_warps=4,
    )  # fmt: skip
    return table, lengths
