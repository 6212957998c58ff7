"""The C++ implementations of the int8 ops; rules as in `native`."""

from __future__ import annotations

from typing import Any

import torch

from ..core.registry import Implementation
from . import native

_MAX_DIM = 512  # kMaxCodedDim


def _quantize_reasons(
    k: torch.Tensor,
    v: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dst_ids: torch.Tensor,
) -> list[str]:
    read = {"k": k, "v": v, "src_ids": src_ids, "dst_ids": dst_ids}
    return native._reasons(k, max_dim=_MAX_DIM, **read, codes=codes, scales=scales)


def _quantize(
    k: torch.Tensor,
    v: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    assert native._module is not None
    P, S, H, D = k.shape
    native._check_ids("quantize_pages", "src_ids", src_ids, P, 0)
    native._check_ids("quantize_pages", "dst_ids", dst_ids, codes.shape[0], 0)
    native._module.quantize_pages(
        k.data_ptr(),
        v.data_ptr(),
        S,
        H,
        D,
        native._DTYPES[k.dtype],
        src_ids.data_ptr(),
        dst_ids.data_ptr(),
        src_ids.numel(),
        codes.data_ptr(),
        scales.data_ptr(),
    )


def _sizes(given: dict[str, Any]) -> tuple[int, int, int, int]:
    """P, S, H and D of pages of codes."""
    return given["codes"].shape[0], given["page_size"], given["codes"].shape[1], given["q"].shape[2]


ATTEND_PAGES_INT8 = native.attention(
    "attend_pages_int8",
    "attend_batch_int8",
    ("codes", "scales"),
    {torch.int8: ()},
    max_dim=_MAX_DIM,
    sizes=_sizes,
    also=("page_size",),
)
QUANTIZE_PAGES = Implementation("native", _quantize, _quantize_reasons)
