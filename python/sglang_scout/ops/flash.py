"""`attend_pages` with FlashAttention-3 from SGLang's kernel package, on Hopper.

Nothing is planned on the host, so a CUDA graph can capture it, unlike FlashInfer's decode. It needs a dense page table,
which `pack_pages` makes, and takes three or four launches where the Triton kernel takes one: a server times both on its
own sizes at start (`engine/attention.py`). fp8 pages are refused: queries would have to be fp8 as well.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import torch

from . import triton
from .layers import resident_slots
from .op import Call, Tolerance, op

_PACKAGE = "sgl_kernel"
SIZES = triton.HEAD_DIMS | {"C": range(1, 2)}


@op(tolerances={"float32": Tolerance(0.0, 0.0, "ids and counts")})
def pack_pages(
    pages: Annotated[torch.Tensor, "B R int32"],
    last_page: Annotated[torch.Tensor | None, "B int32"],
    last_len: Annotated[torch.Tensor | None, "B int32"],
    page_tokens: int,
    slot_of: Annotated[torch.Tensor | None, "I int32"] = None,
    n_pages: Annotated[torch.Tensor | None, "B int32"] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each row's slots to the left, in order, with its last page at the end, so that one length describes it.

    Args:
        pages, last_page, last_len, slot_of, n_pages: as in `attend_pages`.
        page_tokens: S.
    Returns:
        (slots [B, R + 1] int32, 0 after the last one; tokens of each row [B] int32).
    """
    slots = resident_slots(slot_of, pages)
    length = page_tokens * (slots >= 0).sum(1)
    none = slots.new_full((len(slots), 1), -1)
    slots = torch.cat((slots, none if last_page is None else last_page[:, None]), 1)
    if last_page is not None and last_len is not None:
        length += torch.where(last_page >= 0, last_len, 0)
    order = (slots < 0).int().argsort(dim=1, stable=True)
    return slots.gather(1, order).clamp_(min=0), length.int()


pack_pages.triton("pages")


def unless(call: Call) -> str:
    q, k = call["q"], call["k"]
    if q.dtype != k.dtype or k.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}, pages {k.dtype}; flash supports one dtype of 16 bits"
    if (found := torch.cuda.get_device_capability(q.device))[0] != 9:
        return f"compute capability {found[0]}.{found[1]}; flash supports 9.x"
    try:
        library()
    except ImportError as error:
        return f"{_PACKAGE}: {error}"
    return ""


def library() -> Any:
    return importlib.import_module(f"{_PACKAGE}.flash_attn").flash_attn_with_kvcache


def attend(q, k, v, pages, last_page, last_len, scale, slot_of, n_pages):
    """See `ops.attend.attend_pages`."""
    table, tokens = pack_pages(pages, last_page, last_len, k.shape[1], slot_of, n_pages)
    listed = {"page_table": table, "cache_seqlens": tokens}
    found, lse, *_ = library()(
        q.unsqueeze(1), k, v, **listed, softmax_scale=scale, return_softmax_lse=True
    )
    return found.squeeze(1), lse.squeeze(2)
