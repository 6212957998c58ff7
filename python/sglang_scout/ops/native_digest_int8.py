"""The C++ implementations of the ops on int8 digests; rules as in `native`."""

from __future__ import annotations

import torch

from ..core.registry import Implementation
from . import native
from .layers import LayerPages


def _build_reasons(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    low_step: torch.Tensor,
    high: torch.Tensor,
    high_step: torch.Tensor,
) -> list[str]:
    k = source.k[0]
    written = {"low": low, "low_step": low_step, "high": high, "high_step": high_step}
    return native._reasons(k, **{"source.k": k}, ids=ids, **written)


def _build(
    source: LayerPages,
    ids: torch.Tensor,
    low: torch.Tensor,
    low_step: torch.Tensor,
    high: torch.Tensor,
    high_step: torch.Tensor,
) -> None:
    assert native._module is not None
    P, S, H, D = source.k[0].shape
    native._check_ids("build_layer_digests_int8", "ids", ids, P, 0)
    for k, *written in zip(source.k, low, low_step, high, high_step, strict=True):
        native._module.digest_pages_int8(
            k.data_ptr(),
            S,
            H,
            D,
            native._DTYPES[k.dtype],
            ids.data_ptr(),
            ids.numel(),
            *(x.data_ptr() for x in written),
        )


def _score_reasons(
    q: torch.Tensor,
    low: torch.Tensor,
    low_step: torch.Tensor,
    high: torch.Tensor,
    high_step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> list[str]:
    read = {"low": low, "low_step": low_step, "high": high, "high_step": high_step}
    tensors = read | {"q": q, "table": table, "n_full": n_full, "out": out}
    return native._reasons(low, (torch.int8,), **tensors)


def _score(
    q: torch.Tensor,
    low: torch.Tensor,
    low_step: torch.Tensor,
    high: torch.Tensor,
    high_step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert native._module is not None
    (P, H, D), (B, N) = low.shape, table.shape
    if out is None:
        out = q.new_empty((B, N))
    try:
        native._module.score_pages_int8(
            q.data_ptr(),
            low.data_ptr(),
            low_step.data_ptr(),
            high.data_ptr(),
            high_step.data_ptr(),
            P,
            H,
            q.shape[1] // H,
            D,
            table.data_ptr(),
            n_full.data_ptr(),
            B,
            N,
            float(scale),
            native._REDUCTIONS[reduce],
            out.data_ptr(),
            torch.get_num_threads(),
        )
    except ValueError:
        native._check_ids("score_pages_int8", "n_full", n_full, N + 1, 0)
        native._check_ids("score_pages_int8", "table", table, P)
        raise
    return out


BUILD_LAYER_DIGESTS_INT8 = Implementation("native", _build, _build_reasons)
SCORE_PAGES_INT8 = Implementation("native", _score, _score_reasons)
