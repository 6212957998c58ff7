"""`attend_pages` on the device: split over the pages, then one program per query head combines.

Bytes that must move: 2 S H D e per page of a row (K and V, e bytes per element), 4 for its id and, where it has to
be looked up, 4 for its slot, and 8 D + 8 per query head for q, out and lse. With more than one split each adds
8 D + 8 per query head, written and read again; at 8 splits of 64 pages and 5 query heads per KV head, 8 % of the pages.
"""

import torch
import triton
import triton.language as tl

from .exact import dot_fp32, finite, tanh

MAX_SPLITS = 64
_TILE_TOKENS, _TILE_BYTES = 64, 16384  # of K, and of V
# Page ids that a program looks at together. A chunk costs two dependent loads and a dozen barriers, the same
# for 64 ids as for 256, however few of them name a page.
_MAX_CHUNK = 256
_PROGRAMS_PER_SM = 4


@triton.jit
def attend_kernel(
    q, k, v, pages, slot_of, last_page, last_len, n_pages, out, lse,
    scale, logit_cap, R, ids, splits,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_LAST: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_CAP: tl.constexpr, CHUNK: tl.constexpr,
    PAGES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The G query heads of one KV head over every splits-th column of its row of page ids, of C for a request.

    Columns are dealt out one by one, not in runs, so that rows packed to the left keep all programs
    busy. A program reads CHUNK of its ids at once, numbers those that name a page, and goes through
    these only: -1 costs 4 bytes wherever it stands. The tail counts as the column behind the last one.
    PAGES pages make one tile.

    q [B, HQ, D]; k, v [P, S, H, D]; pages [B*C, R]; n_pages [B*C]; out [splits, B, HQ, D]; lse [splits, B, HQ].
    """
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    token = tl.arange(0, PAGES * BLOCK_S)
    which, s = token // BLOCK_S, token % BLOCK_S
    head = (b * H + h) * G + g
    of = b * C + h % C  # row of page ids
    q_mask = (g < G)[:, None] & (d < D)[None, :]
    # [BLOCK_G, BLOCK_D]
    q_tile = tl.load(q + head[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    own = R
    if HAS_COUNT:
        own = tl.minimum(tl.load(n_pages + of), R)
    columns = own
    tail = -1
    tail_len = 0
    if HAS_LAST:
        columns = own + 1
        tail = tl.load(last_page + b)
        tail_len = tl.minimum(tl.load(last_len + b), S)
    for first in range(split, columns, splits * CHUNK):
        column = first + splits * tl.arange(0, CHUNK)
        # [CHUNK]
        page = tl.load(pages + of.to(tl.int64) * R + column, mask=column < own, other=-1)
        if HAS_SLOTS:
            page = tl.load(slot_of + page, mask=(page >= 0) & (page < ids), other=-1)
        if HAS_LAST:
            page = tl.where(column == own, tail, page)
        rank = tl.cumsum((page >= 0).to(tl.int32), axis=0)  # 1 for the first page
        count = tl.max(rank, axis=0)
        rank = tl.where(page >= 0, rank, 0)
        tail_rank = tl.max(tl.where(column == own, rank, 0), axis=0)
        for done in range(0, count, PAGES):
            chosen = tl.zeros([PAGES * BLOCK_S], tl.int32)
            lens = tl.zeros([PAGES * BLOCK_S], tl.int32)
            for i in tl.static_range(PAGES):
                at = done + i + 1
                chosen = tl.where(which == i, tl.max(tl.where(rank == at, page, 0), axis=0), chosen)
                length = tl.where(at == tail_rank, tail_len, tl.where(at <= count, S, 0))
                lens = tl.where(which == i, length, lens)
            here = s < lens  # [PAGES * BLOCK_S]
            offset = ((chosen.to(tl.int64) * S + s) * H + h)[:, None] * D + d[None, :]
            mask = here[:, None] & (d < D)[None, :]
            # [PAGES * BLOCK_S, BLOCK_D]
            k_tile = tl.load(k + offset, mask=mask, other=0.0)
            v_tile = tl.load(v + offset, mask=mask, other=0.0)
            # [BLOCK_G, PAGES * BLOCK_S]
            x = tl.zeros([BLOCK_G, PAGES * BLOCK_S], tl.float32)
            x = dot_fp32(q_tile, tl.trans(k_tile), x) * scale
            if HAS_CAP:
                x = logit_cap * tanh(x / logit_cap)
            x = tl.where(here[None, :], x, float("-inf"))
            new_top = tl.maximum(top, tl.max(x, axis=1))
            base = finite(new_top)
            shrink = tl.exp(top - base)  # [BLOCK_G]
            p = tl.exp(x - base[:, None])  # [BLOCK_G, PAGES * BLOCK_S]
            total = total * shrink + tl.sum(p, axis=1)
            # Tensor cores cut off what they add to: a tile is summed on its own and added rounded,
            # or the error of a long row would grow with its length.
            part = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            acc = acc * shrink[:, None] + dot_fp32(p, v_tile, part)
            top = new_top
    row = (split * tl.num_programs(2) + b) * H * G + h * G + g  # of [splits * B * HQ]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * D + d[None, :], acc, mask=q_mask)
    tl.store(lse + row, top + tl.log(tl.maximum(total, 1.0)), mask=g < G)


@triton.jit
def combine_kernel(
    parts, part_lse, out, lse,
    splits, rows,
    D: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one query head. parts [splits, rows, D]; part_lse [splits, rows]."""
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    # [BLOCK_SPLITS]
    weights = tl.load(part_lse + split * rows + row, mask=split < splits, other=float("-inf"))
    top = tl.max(weights, axis=0)
    weights = tl.exp(weights - finite(top))
    total = tl.sum(weights, axis=0)
    mask = (split < splits)[:, None] & (d < D)[None, :]
    at = (split * rows + row).to(tl.int64)[:, None] * D + d[None, :]
    # [BLOCK_SPLITS, BLOCK_D]
    values = tl.load(parts + at, mask=mask, other=0.0)
    mean = tl.sum(values * weights[:, None], axis=0) / tl.maximum(total, 1.0)  # [BLOCK_D]
    tl.store(out + row.to(tl.int64) * D + d, mean, mask=d < D)
    tl.store(lse + row, top + tl.log(tl.maximum(total, 1.0)))


def split_count(B: int, H: int, columns: int, processors: int) -> int:
    """Programs per (row, KV head): enough for the device, fixed by shapes alone."""
    wanted = triton.cdiv(_PROGRAMS_PER_SM * processors, max(1, B * H))
    return min(MAX_SPLITS, triton.next_power_of_2(wanted), triton.next_power_of_2(max(1, columns)))


def attend_pages(q, k, v, pages, last_page, last_len, scale, logit_cap, out, slot_of, n_pages):
    """See `ops.attend.attend_pages`."""
    (B, HQ, D), (_, S, H, _), R = q.shape, k.shape, pages.shape[1]
    if out is None:
        out = q.new_empty(q.shape), q.new_empty((B, HQ))
    if B == 0:
        return out
    columns = R + (last_page is not None)
    splits = split_count(B, H, columns, processors(q.device))
    parts, part_lse = out
    if splits > 1:
        parts, part_lse = q.new_empty((splits, B, HQ, D)), q.new_empty((splits, B, HQ))
    block_s = triton.next_power_of_2(S)
    attend_kernel[(splits, H, B)](
        q, k, v, pages, slot_of, last_page, last_len, n_pages, parts, part_lse, scale, logit_cap, R,
        0 if slot_of is None else slot_of.numel(), splits, S, H, HQ // H, D,
        slot_of is not None, last_page is not None, n_pages is not None, logit_cap > 0,
        max(16, min(_MAX_CHUNK, triton.next_power_of_2(triton.cdiv(max(1, columns), splits)))),
        pages_per_tile(block_s, D * (2 if k.dtype == torch.bfloat16 else 4)), block_s,
        max(16, triton.next_power_of_2(HQ // H)), triton.next_power_of_2(D), len(pages) // B,
        num_warps=4,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(B * HQ,)](
            parts, part_lse, *out, splits, B * HQ, D, splits, triton.next_power_of_2(D), num_warps=4,
        )  # fmt: skip
    return out


def pages_per_tile(block_s: int, token_bytes: int) -> int:
    """Pages of a tile: up to 64 tokens or 16 KiB, at least the 16 tokens of a tensor core.

    A power of two, as ``block_s`` is, because ``tl.arange`` counts the tile's tokens.
    ``token_bytes`` is what one token takes in shared memory, where float16 is widened.
    """
    tokens = min(_TILE_TOKENS, _TILE_BYTES // token_bytes)
    fitting = max(1, min(4, tokens // block_s))
    return max(16 // block_s, 1 << (fitting.bit_length() - 1))


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
