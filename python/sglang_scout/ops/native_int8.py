"""The C++ implementations of the int8 ops; rules as in `native`."""

from __future__ import annotations

import torch

from ..core.registry import Implementation
from . import native


def _attend_reasons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[str]:
    written, lse = out if out is not None else (None, None)
    return native._reasons(
        k,
        (torch.int8,),
        q=q,
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        pages=pages,
        last_page=last_page,
        last_len=last_len,
        **{"out[0]": written, "out[1]": lse},
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    pages: torch.Tensor,
    last_page: torch.Tensor | None,
    last_len: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert native._module is not None
    return native._attend_batch(
        "attend_pages_int8",
        native._module.attend_batch_int8,
        q,
        (k, v, k_scale, v_scale),
        (),
        pages,
        last_page,
        last_len,
        scale,
        logit_cap,
        out,
    )


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


ATTEND_PAGES_INT8 = Implementation("native", _attend, _attend_reasons)
QUANTIZE_PAGES = Implementation("native", _quantize, _quantize_reasons)
