"""Select the pages a step attends to, and list those that are not resident."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from . import triton as kernels
from .pages import resident_slots

MAX_COLUMNS, MAX_PAGES = 8192, 512  # that one program of the kernel holds
_LARGEST = torch.finfo(torch.float32).max


class Selection(NamedTuple):
    """Physical page ids, int32: ``pages`` [B, k], forced pages first, then by descending score; ``missing`` [B, k], the
    non-resident of these in the same order; both packed to the left and padded with -1. n_missing: [B]."""

    pages: torch.Tensor
    missing: torch.Tensor
    n_missing: torch.Tensor


def select_pages(
    scores: Float32[Tensor, "B N"],
    table: Int32[Tensor, "B N"],
    n_full: Int32[Tensor, " B"],
    slot_of: Int32[Tensor, " P"],
    k: int,
    sink_pages: int = 1,
    recent_pages: int = 1,
    out: tuple[Int32[Tensor, "B {k}"], Int32[Tensor, "B {k}"]] | None = None,
) -> Selection:
    """Top-k pages of every request; sink and recent pages are always included.

    Args:
        scores: see `score_pages`; only columns < n_full count, NaN ranks last. Ties may be broken either way.
        table: page ids below P; negative ones are padding.
        n_full: full pages per request; may be 0, or less than k: then all are selected.
        slot_of: negative if the page is not resident.
        k: pages to select, at least sink_pages + recent_pages. Above MAX_PAGES, or MAX_COLUMNS columns, a device sorts
            with torch: budgets and prompts beyond what is usual.
        sink_pages, recent_pages: number of first and last full pages selected regardless of score.
        out: ``pages`` and ``missing`` to write into, instead of new tensors.
    Source: ScoutAttention Algorithm 1 lines 5 and 6; forced pages: ours.
    """
    if k < max(1, sink_pages + recent_pages):
        what = f"sink_pages={sink_pages} + recent_pages={recent_pages}"
        raise ValueError(f"select_pages: k={k} cannot hold {what}")
    run = select_pages_reference
    if scores.is_cuda and scores.shape[1] <= MAX_COLUMNS and k <= MAX_PAGES:
        run = kernels.select.select_pages
    return run(scores, table, n_full, slot_of, k, sink_pages, recent_pages, out)


def select_pages_reference(scores, table, n_full, slot_of, k, sink_pages, recent_pages, out=None):
    B, N = table.shape
    last = n_full[:, None] - 1  # column of the newest full page
    void = (torch.arange(N, dtype=torch.int32, device=table.device) > last) | (table < 0)
    # Between void (-inf) and forced (+inf) every candidate has a finite key, whatever its score.
    key = torch.nan_to_num(scores, nan=-_LARGEST, neginf=-_LARGEST, posinf=_LARGEST)
    if N > 0:
        newest = last - torch.arange(recent_pages, device=table.device)
        key.scatter_(1, newest.clamp_(0, N - 1), torch.inf)
        key[:, :sink_pages] = torch.inf
    key.masked_fill_(void, -torch.inf)
    top, best = torch.topk(key, min(k, N), dim=1)
    found = table.gather(1, best).masked_fill_(top == -torch.inf, -1)
    pages = found if k <= N else torch.nn.functional.pad(found, (0, k - N), value=-1)
    lacks_slot = (resident_slots(slot_of, pages) < 0) & (pages >= 0)
    # Pack to the left: a missing page goes to its prefix count, others scatter -1 to index 0, without effect.
    place = lacks_slot.cumsum(1).sub_(1).mul_(lacks_slot)
    missing = torch.full_like(pages, -1)
    missing.scatter_reduce_(1, place, pages.masked_fill(~lacks_slot, -1), "amax")
    if out is not None:
        pages, missing = out[0].copy_(pages), out[1].copy_(missing)
    return Selection(pages, missing, lacks_slot.sum(1, dtype=torch.int32))
