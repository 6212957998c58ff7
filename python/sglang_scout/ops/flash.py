"""`attend_pages` by FlashAttention-3 of SGLang's kernel package, on Hopper.

Page table and lengths are on the device and nothing is planned on the host, so that a graph captures it; it wants
slots without gaps, which `pack_pages` makes. Pages may have any number of tokens, and a row of none gets out = 0 and
lse = -inf, as ours does. fp8 is left out: queries would have to be fp8 as well, and e5m2 is not supported.

By its source it is three launches (ours, its scheduler, the attention) and at small batches a fourth (the merge of
its splits), where the Triton kernel is one: a server times both on its own sizes at start (`engine/attention.py`).
FlashInfer is left out: its decode freezes counts and splits in ``plan()``, which copies to the
host and cannot be captured.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from . import triton
from .op import Call, Implementation, Tensors
from .pack import pack_pages

_PACKAGE = "sgl_kernel"


def _devices(tensors: Tensors) -> list[str]:
    for name, x in tensors:
        if not x.is_cuda:
            return [f"{name} is on {x.device}; flash supports cuda"]
        if (found := torch.cuda.get_device_capability(x.device))[0] != 9:
            return [f"compute capability {found[0]}.{found[1]}; flash supports 9.x"]
    return []


def _unless(call: Call) -> str:
    if call["q"].dtype != call["k"].dtype:
        return f"queries are {call['q'].dtype}, pages {call['k'].dtype}; flash supports one dtype"
    try:
        library()
    except ImportError as error:
        return f"{_PACKAGE}: {error}"
    return ""


def library() -> Any:
    """Raises ImportError where the package is absent, or was packed without FlashAttention-3."""
    return importlib.import_module(f"{_PACKAGE}.flash_attn").flash_attn_with_kvcache


def attend(
    q, k, v, pages, last_page, last_len, scale, logit_cap, out, slot_of, n_pages
):  # fmt: skip
    """See `ops.attend.attend_pages`."""
    table, tokens = pack_pages(pages, last_page, last_len, k.shape[1], slot_of, n_pages)
    found, lse, *_ = library()(
        q.unsqueeze(1), k, v, page_table=table, cache_seqlens=tokens, softmax_scale=scale,
        softcap=logit_cap, return_softmax_lse=True,
    )  # fmt: skip
    found, lse = found.squeeze(1), lse.squeeze(2)
    return (found, lse) if out is None else (out[0].copy_(found), out[1].copy_(lse))


FLASH = Implementation(
    "flash",
    attend,
    devices=_devices,
    dtypes=(torch.bfloat16, torch.float16),
    sizes={"D": triton.HEAD_DIMS, "C": range(1, 2)},
    unless=_unless,
)
