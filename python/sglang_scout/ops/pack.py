"""A step's pages in the form that library attention kernels take: a dense slot table and sequence lengths."""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import triton
from .layers import resident_slots
from .op import op


@op(
    pages="B R int32",
    last_page="B int32",
    last_len="B int32",
    slot_of="I int32",
    n_pages="B int32",
    tolerances={"float32": Tolerance(0.0, 0.0, "ids and counts")},
)
def pack_pages(
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    page_tokens: int,
    slot_of: torch.Tensor | None = None,
    n_pages: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each row's slots to the left, in order, with its last page at the end, so that one length describes it.

    Args:
        pages, last_page, last_len, slot_of, n_pages: as in `attend_pages`.
        page_tokens: S.
    Returns:
        (slots [B, R + 1] int32, 0 after the last one; tokens of each row [B] int32).
    Source: the operation is ours.
    """
    slots = resident_slots(slot_of, pages)
    length = page_tokens * (slots >= 0).sum(1)
    none = slots.new_full((len(slots), 1), -1)
    slots = torch.cat((slots, none if last_page is None else last_page[:, None]), 1)
    if last_page is not None and last_len is not None:
        length += torch.where(last_page >= 0, last_len, 0)
    order = (slots < 0).int().argsort(dim=1, stable=True)
    return slots.gather(1, order).clamp_(min=0), length.int()


triton.implements(pack_pages, "pack")
