"""`attend_pages` on the device: one launch, split over the pages; and `merge_states`, whose second part may be in
pinned host memory. At 8 splits of 64 pages and 5 query heads per KV head, splitting adds 8 % of the pages' traffic."""

import functools
import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from .common import as_loaded, dot_fp32, finite, rounded, stored_as, widened
from .pages import listed_slots

_TILE_TOKENS, _TILE_BYTES = 64, 16384  # of K and of V each
# Page ids per iteration, which costs two dependent loads and a dozen barriers, for 64 ids as for 256.
_MAX_CHUNK = 256
_SPLITS = (1, 2, 4, 8, 16)  # the last to finish merges all
# The time of five dependent loads before the first tile, and of loading other programs' results, in tiles (some .8 us).
_START_TILES, _MERGE_TILES = 4, 2
_MAX_TILES = 64  # of a program, while there are fewer splits than allowed
MAX_ROWS = 4096  # rows and KV heads; more are not split
_STAGES = tl.constexpr(5)  # prefetch distance: four tiles for ids, two for K and V
_MERGED = tl.constexpr(4)  # splits merged per iteration
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def attend_kernel(
    q, k, v, pages, slot_of, last_page, last_len, n_pages, listed, parts, part_lse, arrivals, out, lse,
    scale, R, ids, splits,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, IS_SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, PAGES: tl.constexpr, C: tl.constexpr, FP8: tl.constexpr,
):
    """The G query heads of one KV head over every splits-th column of its row of page ids (C rows per request).

    Columns are interleaved among programs, so that rows packed to the left keep all busy. A program compacts the valid
    ones of CHUNK ids at a time into a list. The tail is the column after the last one. A tile is PAGES pages, whose
    slots come from the list in one load, so that tiles can be prefetched. The last program of a row and KV head to
    arrive merges all splits. listed [B, H, splits, CHUNK]; parts [splits, B, HQ, D]; part_lse [splits, B, HQ];
    arrivals [B * H]: 0 before and after.
    """
    BLOCK_S: tl.constexpr = triton.next_power_of_2(S)
    BLOCK_G: tl.constexpr = max(16, triton.next_power_of_2(G))
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
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
    listed += ((b * H + h) * splits + split) * CHUNK
    own = R
    if n_pages is not None:
        own = tl.minimum(tl.load(n_pages + of), R)
    columns = own
    tail = -1
    tail_len = 0
    if last_page is not None:
        columns = own + 1
        tail = tl.load(last_page + b)
        tail_len = tl.minimum(tl.load(last_len + b), S)
    for first in range(split, columns, splits * CHUNK):
        column = first + splits * tl.arange(0, CHUNK)
        page = listed_slots(pages, of.to(tl.int64) * R, column, own, slot_of, ids)  # [CHUNK]
        if last_page is not None:
            page = tl.where(column == own, tail, page)
        rank = tl.cumsum((page >= 0).to(tl.int32), axis=0)  # 1 for the first page
        count = tl.max(rank, axis=0)
        tail_rank = tl.max(tl.where((column == own) & (page >= 0), rank, 0), axis=0)
        tl.debug_barrier()  # all threads have finished reading the previous list
        tl.store(listed + rank - 1, page, mask=page >= 0)
        tl.debug_barrier()
        for done in tl.range(0, count, PAGES, num_stages=_STAGES):
            at = done + which
            # [PAGES * BLOCK_S]
            slot = tl.load(listed + at, mask=at < count, other=0)
            here = (at < count) & (s < tl.where(at + 1 == tail_rank, tail_len, S))
            offset = ((slot.to(tl.int64) * S + s) * H + h)[:, None] * D + d[None, :]
            mask = here[:, None] & (d < D)[None, :]
            # [PAGES * BLOCK_S, BLOCK_D]
            k_tile = widened(tl.load(k + offset, mask=mask, other=0), FP8)
            v_tile = widened(tl.load(v + offset, mask=mask, other=0), FP8)
            # [BLOCK_G, PAGES * BLOCK_S]
            x = tl.zeros([BLOCK_G, PAGES * BLOCK_S], tl.float32)
            x = dot_fp32(q_tile, tl.trans(k_tile), x) * scale
            x = tl.where(here[None, :], x, float("-inf"))
            new_top = tl.maximum(top, tl.max(x, axis=1))
            base = finite(new_top)
            shrink = tl.exp2(top - base)  # [BLOCK_G]
            p = tl.exp2(x - base[:, None])  # [BLOCK_G, PAGES * BLOCK_S]
            total = total * shrink + tl.sum(p, axis=1)
            if q.dtype.element_ty == tl.bfloat16 and v_tile.dtype == tl.bfloat16:
                # As in FlashAttention: each product is off by up to 2^-8, to which the model rounds the sum anyway.
                acc = dot_fp32(rounded(p, tl.bfloat16), v_tile, acc * shrink[:, None])
            else:
                # Tensor cores truncate when they accumulate: summing tiles apart bounds the error.
                part = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
                acc = acc * shrink[:, None] + dot_fp32(p, v_tile, part)
            top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    top += tl.log2(tl.maximum(total, 1.0))
    at_out = head.to(tl.int64)[:, None] * D + d[None, :]
    if IS_SPLIT:
        rows = tl.num_programs(2) * H * G
        row = split * rows + head  # of [splits * B * HQ]
        tl.store(parts + row.to(tl.int64)[:, None] * D + d[None, :], acc, mask=q_mask)
        tl.store(part_lse + row, top, mask=g < G)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + b * H + h, 1, sem="acq_rel") == splits - 1:
            tl.store(arrivals + b * H + h, 0)  # for the next launch
            merge_parts(parts, part_lse, out, lse, head, at_out, q_mask, splits, rows, D)
    else:
        tl.store(out + at_out, acc, mask=q_mask)
        tl.store(lse + head, top * _LN_2, mask=g < G)


@triton.jit
def merge_parts(parts, part_lse, out, lse, head, at_out, q_mask, splits, rows, D: tl.constexpr):
    """Merges the splits of rows ``head`` [M]. parts [splits, rows, D]; part_lse [splits, rows]."""
    M: tl.constexpr = q_mask.shape[0]
    g = tl.max(q_mask.to(tl.int32), axis=1) > 0
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, q_mask.shape[1]], tl.float32)
    for first in range(0, splits, _MERGED):
        split = first + tl.arange(0, _MERGED)
        mask = (split < splits)[:, None] & g[None, :]
        # [_MERGED, M] and [_MERGED, M, BLOCK_D]; bypass L1, which is not coherent with other programs' stores.
        x = tl.load(
            part_lse + split[:, None] * rows + head[None, :],
            mask=mask, other=float("-inf"), cache_modifier=".cg",
        )
        values = tl.load(
            parts + (split[:, None, None] * rows).to(tl.int64) * D + at_out[None, :, :],
            mask=(split < splits)[:, None, None] & q_mask[None, :, :], other=0.0, cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(x, axis=0))
        base = finite(new_top)
        shrink, weights = tl.exp2(top - base), tl.exp2(x - base[None, :])
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        top = new_top
    tl.store(out + at_out, acc / tl.maximum(total, 1.0)[:, None], mask=q_mask)
    tl.store(lse + head, (top + tl.log2(tl.maximum(total, 1.0))) * _LN_2, mask=g)


def programs_per_sm(dtype: torch.dtype, D: int) -> int:
    """Of `attend_kernel` with pages of this dtype, whose registers are limited accordingly."""
    return 3 if dtype != torch.float32 and D <= 128 else 2


def programs_per_row(
    rows: int, tiles: int, slots: int, choices: Iterable[int], start: float, merge: int = 0
) -> int:
    """Programs that share the tiles of each of ``rows`` rows and KV heads, on a device that holds ``slots``: of the
    ``choices`` the first whose last wave ends first. ``start``, ``merge``: of a program, in tiles."""

    def time(programs: int) -> float:
        waves = triton.cdiv(rows * programs, slots)
        return waves * (start + triton.cdiv(tiles, programs)) + (programs > 1) * merge

    return min(choices, key=time)


def split_count(rows: int, tiles: int, slots: int) -> int:
    """`programs_per_row` of attention. Wide rows, which differ in length, are split even where they fill the device."""
    if rows > MAX_ROWS:
        return 1
    fewest = min(_SPLITS[-1], triton.next_power_of_2(triton.cdiv(max(1, tiles), _MAX_TILES)))
    choices = (s for s in _SPLITS if s >= fewest)
    return programs_per_row(rows, tiles, slots, choices, _START_TILES, _MERGE_TILES)


@functools.cache
def arrivals_of(user: str, device: torch.device) -> torch.Tensor:
    """Zeros, left as zeros, shared by launches of ``user``, which are not concurrent. The first launch makes them,
    before any graph is captured."""
    return torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


def attend_pages(q, k, v, pages, last_page, last_len, scale, slot_of=None, n_pages=None):
    (B, HQ, D), (_, S, H, _), R = q.shape, k.shape, pages.shape[1]
    out = q.new_empty(q.shape, dtype=torch.float32), q.new_empty((B, HQ), dtype=torch.float32)
    if B == 0:
        return out
    columns, fp8 = R + (last_page is not None), stored_as(k.dtype)[1]
    token_bytes = D * (2 if fp8 or k.dtype == torch.bfloat16 else 4)
    tile_pages = pages_per_tile(triton.next_power_of_2(S), token_bytes)
    per_sm = programs_per_sm(k.dtype, D)
    splits = split_count(B * H, triton.cdiv(columns, tile_pages), per_sm * processors(q.device))
    parts, part_lse = out
    if splits > 1:
        parts, part_lse = (x.new_empty((splits, *x.shape)) for x in out)
    scale /= _LN_2.value  # scores in base 2
    chunk = max(16, min(_MAX_CHUNK, triton.next_power_of_2(triton.cdiv(max(1, columns), splits))))
    attend_kernel[(splits, H, B)](
        q, as_loaded(k), as_loaded(v), pages, slot_of, last_page, last_len, n_pages,
        pages.new_empty((B, H, splits, chunk)), parts, part_lse, arrivals_of("attend", q.device), *out, scale,
        R, 0 if slot_of is None else slot_of.numel(), splits, S, H, HQ // H, D,
        splits > 1, chunk, tile_pages, len(pages) // B, fp8, num_warps=4, maxnreg=64 // per_sm * 8,
    )
    return out


def pages_per_tile(block_s: int, token_bytes: int) -> int:
    """Pages per tile, a power of two like ``block_s``: up to 64 tokens or 16 KiB, at least the 16 tokens of a
    tensor-core tile. ``token_bytes``: of one token in shared memory, where float16 is widened."""
    tokens = min(_TILE_TOKENS, _TILE_BYTES // token_bytes)
    fitting = max(1, min(4, tokens // block_s))
    return max(16 // block_s, 1 << (fitting.bit_length() - 1))


def processors(device: torch.device) -> int:
    """SMs of a device; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def merge_rows(out_a, lse_a, out_b, lse_b):
    """Merge two parts of the same rows: out [R, D] and lse [R]. If one is empty, exactly the other."""
    gap = lse_b - lse_a
    weight = tl.where(gap == gap, 1.0 / (1.0 + tl.exp(-gap)), 0.0)[:, None]  # both empty: NaN
    step = out_b - out_a
    out = tl.where(weight < 0.5, out_a + weight * step, out_b - (1.0 - weight) * step)
    top = tl.maximum(lse_a, lse_b)
    small = tl.exp(-tl.abs(gap))
    # log1p(x), accurate for small x.
    grown = 1.0 + small
    extra = tl.where(grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0)))
    return out, tl.where(gap == gap, top + extra, top)


@triton.jit
def merge_kernel(out_a, lse_a, out_b, lse_b, out, lse, rows, D: tl.constexpr, BLOCK_R: tl.constexpr):
    """A block of rows."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, triton.next_power_of_2(D))
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    mask = (r < rows)[:, None] & (d < D)[None, :]
    # [BLOCK_R, BLOCK_D] and [BLOCK_R]
    merged, total = merge_rows(
        tl.load(out_a + at, mask=mask, other=0.0),
        tl.load(lse_a + r, mask=r < rows, other=0.0),
        tl.load(out_b + at, mask=mask, other=0.0),
        tl.load(lse_b + r, mask=r < rows, other=0.0),
    )
    tl.store(out + at, merged, mask=mask)
    tl.store(lse + r, total, mask=r < rows)


def merge_states(out_a, lse_a, out_b, lse_b):
    B, HQ, D = out_a.shape
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    block_r = max(1, 1024 // triton.next_power_of_2(D))
    merge_kernel[(triton.cdiv(B * HQ, block_r),)](
        out_a, lse_a, out_b, lse_b, out, lse, B * HQ, D, block_r, num_warps=4
    )
    return out, lse
