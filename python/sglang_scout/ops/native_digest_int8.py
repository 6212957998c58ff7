"""The C++ implementations of the ops on int8 digests; rules as in `native`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core.registry import Implementation
from . import native
from .layers import LayerPages

if TYPE_CHECKING:
    from .digest_int8 import Int8Digests


def _build_reasons(
    source: LayerPages,
    ids: torch.Tensor,
    digests: Int8Digests,
    rows: torch.Tensor | None = None,
) -> list[str]:
    return native.source_reasons(source, rows, ids=ids, **digests._asdict())


def _build(
    source: LayerPages,
    ids: torch.Tensor,
    digests: Int8Digests,
    rows: torch.Tensor | None = None,
) -> None:
    assert native._module is not None
    P, S, H, D = source.k[0].shape
    native._check_ids("build_layer_digests_int8", "ids", ids, P, 0)
    for k, *written in zip(source.k, *digests, strict=True):
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
    digests: Int8Digests,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> list[str]:
    tensors = {"q": q, "table": table, "n_full": n_full, "out": out}
    return native._reasons(digests.low, (torch.int8,), **tensors, **digests._asdict())


def _score(
    q: torch.Tensor,
    digests: Int8Digests,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert native._module is not None
    (P, H, D), (B, N) = digests.low.shape, table.shape
    if out is None:
        out = q.new_empty((B, N))
    with native.naming_pages("score_pages_int8", table, n_full, P):
        native._module.score_pages_int8(
            q.data_ptr(),
            *(x.data_ptr() for x in digests),
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
    return out


BUILD_LAYER_DIGESTS_INT8 = Implementation("native", _build, _build_reasons)
SCORE_PAGES_INT8 = Implementation("native", _score, _score_reasons)
