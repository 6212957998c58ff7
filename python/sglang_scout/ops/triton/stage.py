"""Selected pages of one layer to their staging slots: `stage_pages`.

Memory traffic: K and V of each page, or of one list's heads of it, over the bus. The copy is on the step's critical
path, so the number of programs is not limited. Ids are below P by contract; negative ones are skipped.
"""

import torch
import triton
import triton.language as tl

from .pages import layer_pointer

_BLOCK_WORDS = 2048


@triton.jit
def stage_kernel(
    addresses, pages, dst_k, dst_v,
    layer, L, P, k, row_words, words, page_words, slot_words,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of words of one list entry, of K (program 0 of axis 2) or V.

    addresses [2, L] of [P, S, row_words]; pages [R, k]; dst_k, dst_v [slots, S, words], words of each row's list.
    """
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
        where = entry.to(tl.int64) * slot_words + at
        if is_v == 0:
            tl.store(dst_k + where, value, mask=mask)
        else:
            tl.store(dst_v + where, value, mask=mask)


def stage_pages(source, layer, pages, dst_k, dst_v):
    """See `ops.stage.stage_pages`."""
    (R, k), S = pages.shape, dst_k.shape[1]
    row_bytes, list_bytes = source.k[0][0, :1].nbytes, dst_k[:1, :1].nbytes
    if R * k * S * list_bytes == 0:
        return
    starts = source.align_bytes, list_bytes, dst_k.data_ptr(), dst_v.data_ptr()
    word = torch.int32 if all(x % 4 == 0 for x in starts) else torch.uint8
    row_words, words = row_bytes // word.itemsize, list_bytes // word.itemsize
    block = min(_BLOCK_WORDS, triton.next_power_of_2(S * words))
    stage_kernel[(R * k, triton.cdiv(S * words, block), 2)](
        source.addresses, pages, dst_k.flatten().view(word), dst_v.flatten().view(word),
        layer, len(source.k), source.k[0].shape[0], k, row_words, words, S * row_words, S * words,
        source.align_bytes, block, num_warps=4,
    )  # fmt: skip
