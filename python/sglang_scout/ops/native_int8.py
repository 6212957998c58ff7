"""The C++ implementations of the int8 ops; rules as in `native`."""

from __future__ import annotations

import torch

from ..core.registry import Implementation
from . import native


def _quantize_reasons(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    dst_ids: torch.Tensor,
) -> list[str]:
    return native._reasons(src, src=src, src_ids=src_ids, codes=codes, scale=scale, dst_ids=dst_ids)


def _quantize(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    assert native._module is not None
    P, S, H, D = src.shape
    native._check_ids("quantize_pages", "src_ids", src_ids, P, 0)
    native._check_ids("quantize_pages", "dst_ids", dst_ids, codes.shape[0], 0)
    native._module.quantize_pages(
        src.data_ptr(),
        S,
        H,
        D,
        native._DTYPES[src.dtype],
        src_ids.data_ptr(),
        dst_ids.data_ptr(),
        src_ids.numel(),
        codes.data_ptr(),
        scale.data_ptr(),
    )


ATTEND_PAGES_INT8 = native.attention(
    "attend_pages_int8",
    "attend_batch_int8",
    ("k", "v", "k_scale", "v_scale"),
    {torch.int8: ()},
    max_dim=512,  # kMaxCodedDim
)
QUANTIZE_PAGES = Implementation("native", _quantize, _quantize_reasons)
