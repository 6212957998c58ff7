"""`build_layer_digests`, `copy_layer_pages`, `append_tokens` and `stage_pages` on the device. Ids out of range are
skipped, as the host cannot check those that live on the device."""

import torch
import triton
import triton.language as tl

from .common import as_loaded, fp8_bits, rounded, stored_as, widened

_COPY_WORDS = 4096  # per program and iteration: 16 KiB with 4-byte words
# A recall is overlapped with a step: just enough programs to saturate the bus, as polls for the answer of CPU attention
# queue behind all in-flight reads from the host.
_COPY_PROGRAMS = 16
_STAGE_WORDS = 2048


@triton.jit
def layer_pointer(addresses, layer, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Base pointer of a layer's pages."""
    return tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def source_of(addresses, ids, rows, P, R, KV: tl.constexpr, ALIGN: tl.constexpr):
    """Of a program for a page, head and layer: the layer's K [R, S, H, D]; the page's row there, from rows [L, n], or
    its id if None; and its row among digests [L, P, H], -1 if an id or row is out of range."""
    page, layer = tl.load(ids + tl.program_id(0)), tl.program_id(2).to(tl.int64)
    source = page
    if rows is not None:
        source = tl.load(rows + layer * tl.num_programs(0) + tl.program_id(0))
    inside = (page >= 0) & (page < P) & (source >= 0) & (source < R)
    row = (layer * P + page) * tl.num_programs(1) + tl.program_id(1)
    return layer_pointer(addresses, layer, KV, ALIGN), source, tl.where(inside, row, -1)


@triton.jit
def page_keys(k, source, S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr):
    """The page at row ``source`` of K for the program's head, [BLOCK_S, BLOCK_D] float32, and where it has elements."""
    s, d = tl.arange(0, triton.next_power_of_2(S)), tl.arange(0, triton.next_power_of_2(D))
    mask = (s < S)[:, None] & (d < D)[None, :]
    at = ((source * S + s) * H + tl.program_id(1))[:, None] * D + d[None, :]
    return widened(tl.load(k + at, mask=mask, other=0), FP8).to(tl.float32), mask


@triton.jit
def digest_kernel(
    addresses, ids, rows, kmin, kmax,
    P, R,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, KV: tl.constexpr, FP8: tl.constexpr, ALIGN: tl.constexpr,
):
    """One page, head and layer."""
    k, source, row = source_of(addresses, ids, rows, P, R, KV, ALIGN)
    if row >= 0:
        x, mask = page_keys(k, source, S, H, D, FP8)
        low, high = tl.where(mask, x, float("inf")), tl.where(mask, x, float("-inf"))
        d = tl.arange(0, triton.next_power_of_2(D))
        at = row * D + d
        tl.store(kmin + at, tl.min(low, axis=0).to(kmin.dtype.element_ty), mask=d < D)
        tl.store(kmax + at, tl.max(high, axis=0).to(kmax.dtype.element_ty), mask=d < D)


@triton.jit
def listed_slots(pages, row, column, own, slot_of, ids):
    """Ids at the columns below ``own`` of the list that begins at ``row``, or their slots; -1: none. slot_of [ids] or
    None."""
    page = tl.load(pages + row + column, mask=column < own, other=-1)
    if slot_of is not None:
        page = tl.load(slot_of + page, mask=(page >= 0) & (page < ids), other=-1)
    return page


# Compiled once for all numbers of pages.
@triton.jit(do_not_specialize=["n"])
def copy_kernel(
    addresses, ids, dst_k, dst_v,
    n, L, P, slots, words,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):
    """Blocks of words, for each page first K, then V, in a grid-stride loop. addresses [2, L] of [P, words]."""
    blocks = tl.cdiv(words, BLOCK)
    for task in range(tl.program_id(0), 2 * blocks * n, tl.num_programs(0)):
        i, block = task // (2 * blocks), task % (2 * blocks)
        layer, page = tl.load(ids + i), tl.load(ids + n + i)
        slot = tl.load(ids + 2 * n + i)
        is_v = block // blocks
        at = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = (layer >= 0) & (layer < L) & (page >= 0) & (page < P)
        if inside & (slot >= 0) & (slot < slots):
            at_layer = is_v * L + layer
            src = layer_pointer(addresses, at_layer, dst_k.dtype.element_ty, ALIGN)
            # [BLOCK]
            value = tl.load(src + page * words + at, mask=at < words)
            dst = dst_v if is_v else dst_k
            tl.store(dst + (layer * slots + slot) * words + at, value, mask=at < words)


@triton.jit
def append_kernel(
    k, v, lens, k_pages, v_pages, ids, k_mirror, v_mirror, mirror_ids,
    k_stride, v_stride, P, mirror_P, S,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
):
    """One block of one row of K (program 0 of axis 2) or of V, to one pool or to both."""
    b, is_v = tl.program_id(0), tl.program_id(2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(lens + b) - 1
    new = (v if is_v else k) + b.to(tl.int64) * (v_stride if is_v else k_stride)
    value = tl.load(new + at, mask=at < WIDTH)  # [BLOCK]
    if FP8 == 0:
        value = rounded(value, k_pages.dtype.element_ty)
    else:
        value = fp8_bits(value, FP8)
    inside = (at < WIDTH) & (offset >= 0) & (offset < S)
    page = tl.load(ids + b).to(tl.int64)
    to = (v_pages if is_v else k_pages) + (page * S + offset) * WIDTH + at
    tl.store(to, value, mask=inside & (page >= 0) & (page < P))
    if k_mirror is not None:
        page = tl.load(mirror_ids + b).to(tl.int64)
        to = (v_mirror if is_v else k_mirror) + (page * S + offset) * WIDTH + at
        tl.store(to, value, mask=inside & (page >= 0) & (page < mirror_P))


@triton.jit
def stage_kernel(
    addresses, pages, dst_k, dst_v,
    layer, L, P, k, row_words, words, page_words, slot_words,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):
    """One block of words of one list entry, of K (program 0 of axis 2) or V. addresses [2, L] of [P, S, row_words];
    dst_k, dst_v [slots, S, words], words of each row's list."""
    entry = tl.program_id(0)
    page = tl.load(pages + entry).to(tl.int64)
    if (page >= 0) & (page < P):
        is_v = tl.program_id(2)
        src = layer_pointer(addresses, is_v * L + layer, dst_k.dtype.element_ty, ALIGN)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < slot_words
        first = entry // k % (row_words // words) * words  # of the list in a token's row
        # [BLOCK]
        value = tl.load(
            src + page * page_words + at // words * row_words + first + at % words, mask=mask
        )
        dst = dst_v if is_v else dst_k
        tl.store(dst + entry.to(tl.int64) * slot_words + at, value, mask=mask)


def for_each_page(kernel, source, ids, rows, to, *constants):
    """Launch a kernel like `digest_kernel`, with ``constants`` of its own after D, for every page, head and layer."""
    R, S, H, D = source.k[0].shape
    if ids.numel():
        kernel[(ids.numel(), H, len(source.k))](
            source.addresses, ids, rows, *to, to[0].shape[1], R, S, H, D, *constants,
            *stored_as(source.k[0].dtype), source.align_bytes, num_warps=4,
        )


def build_layer_digests(source, ids, kmin, kmax, rows=None):
    for_each_page(digest_kernel, source, ids, rows, (kmin, kmax))


def word_of(*starts: int) -> torch.dtype:
    return torch.int32 if all(start % 4 == 0 for start in starts) else torch.uint8


def copy_layer_pages(source, ids, dst_k, dst_v):
    (L, slots), n = dst_k.shape[:2], ids.shape[1]
    page_bytes = source.k[0][:1].nbytes
    if n == 0 or page_bytes == 0:
        return
    if ids.device != dst_k.device:
        ids = ids.pin_memory().to(dst_k.device, non_blocking=True)
    word = word_of(source.align_bytes, dst_k.data_ptr(), dst_v.data_ptr())
    words = page_bytes // word.itemsize
    block = min(_COPY_WORDS, triton.next_power_of_2(words))
    tasks = 2 * n * triton.cdiv(words, block)
    from_host = source.k[0].device.type == "cpu"
    copy_kernel[(min(tasks, _COPY_PROGRAMS) if from_host else tasks,)](
        source.addresses, ids, dst_k.view(L, slots, -1).view(word), dst_v.view(L, slots, -1).view(word),
        n, L, source.k[0].shape[0], slots, words, source.align_bytes, block, num_warps=4,
    )


def append_tokens(k, v, lens, pool, mirror=None):
    B, H, D = k.shape
    block = min(1024, triton.next_power_of_2(H * D))
    pools = *map(as_loaded, pool), *(map(as_loaded, mirror) if mirror else [None] * 3)
    append_kernel[(B, triton.cdiv(H * D, block), 2)](
        k, v, lens, *pools, k.stride(0), v.stride(0), pool[0].shape[0],
        mirror[0].shape[0] if mirror else 0, pool[0].shape[1], H * D, block,
        stored_as(pool[0].dtype)[1], num_warps=4,
    )


def stage_pages(source, layer, pages, dst_k, dst_v):
    (R, k), S = pages.shape, dst_k.shape[1]
    row_bytes, list_bytes = source.k[0][0, :1].nbytes, dst_k[:1, :1].nbytes
    if R * k * S * list_bytes == 0:
        return
    word = word_of(source.align_bytes, list_bytes, dst_k.data_ptr(), dst_v.data_ptr())
    row_words, words = row_bytes // word.itemsize, list_bytes // word.itemsize
    block = min(_STAGE_WORDS, triton.next_power_of_2(S * words))
    stage_kernel[(R * k, triton.cdiv(S * words, block), 2)](
        source.addresses, pages, dst_k.flatten().view(word), dst_v.flatten().view(word),
        layer, len(source.k), source.k[0].shape[0], k, row_words, words, S * row_words, S * words,
        source.align_bytes, block, num_warps=4,
    )
