"""The C++ implementations of the ops on key signs; rules as in `native`."""

from __future__ import annotations

import torch

from ..core.registry import Implementation
from . import native
from .layers import LayerPages


def _sign_reasons(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> list[str]:
    return native.source_reasons(source, rows, ids=ids, low=low, high=high)


def _sign(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    assert native._module is not None
    P, _, H, D = source.k[0].shape
    native._check_ids("build_layer_signs", "ids", ids, P, 0)
    for k, first, second in zip(source.k, low, high, strict=True):
        native._module.sign_pages(
            k.data_ptr(),
            H,
            D,
            native._DTYPES[k.dtype],
            ids.data_ptr(),
            ids.numel(),
            first.data_ptr(),
            second.data_ptr(),
        )


def _score_signs_reasons(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    out: torch.Tensor | None = None,
) -> list[str]:
    return native._reasons(low, q=q, low=low, high=high, table=table, n_full=n_full, out=out)


def _score_signs(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert native._module is not None
    (P, H, D), (B, N) = low.shape, table.shape
    if out is None:
        out = q.new_empty((B, N))
    with native.naming_pages("score_signs", table, n_full, P):
        native._module.score_signs(
            q.data_ptr(),
            low.data_ptr(),
            high.data_ptr(),
            native._DTYPES[low.dtype],
            P,
            H,
            q.shape[1] // H,
            D,
            table.data_ptr(),
            n_full.data_ptr(),
            B,
            N,
            out.data_ptr(),
            torch.get_num_threads(),
        )
    return out


BUILD_LAYER_SIGNS = Implementation("native", _sign, _sign_reasons)
SCORE_SIGNS = Implementation("native", _score_signs, _score_signs_reasons)
