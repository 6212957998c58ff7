"""`attend_pages` with FlashAttention-3 from SGLang's kernel package, on Hopper.

Page table and lengths are on the device and nothing is planned on the host, so a CUDA graph can capture it; it needs
a dense page table, which `pack_pages` makes. Any page size works, and an empty row gets out = 0 and lse = -inf, as in
our kernels. fp8 pages are refused: queries would have to be fp8 as well, and e5m2 is not supported.

According to its source it takes three launches (`pack_pages`, its scheduler, the attention) and at small batches a
fourth (merging its splits), the Triton kernel one: a server times both on its own sizes at start
(`engine/attention.py`). FlashInfer is not used: its decode fixes counts and splits in ``plan()``, which copies to the
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
    """Raises ImportError if the package is absent or was built without FlashAttention-3."""
    return importlib.import_module(f"{_PACKAGE}.flash_attn").flash_attn_with_kvcache


def attend(
    q, k, v, pages, last_page, last_len, scale, out, slot_of, n_pages
):  # fmt: skip
    """See `ops.attend.attend_pages`."""
    table, tokens = pack_pages(pages, last_page, last_len, k.shape[1], slot_of, n_pages)
    found, lse, *_ = library()(
        q.unsqueeze(1), k, v, page_table=table, cache_seqlens=tokens, softmax_scale=scale,
        return_softmax_lse=True,
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
