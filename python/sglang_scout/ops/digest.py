"""Page digests: elementwise minimum and maximum of a page's keys after RoPE (Quest, section 3.3)."""

from __future__ import annotations

import functools
from typing import Annotated

import torch

from .. import _native
from . import triton
from .layers import HEAD_DIMS, KV_DTYPE_NAMES, LayerPages, source_rows
from .op import Call, Tolerance, op

_EXACT = Tolerance(0.0, 0.0, "a minimum is one of the inputs: nothing is rounded")
TOLERANCES = dict.fromkeys(KV_DTYPE_NAMES, _EXACT)


def same_rows(call: Call) -> str:
    """For ops that read each page at the row of its id, unless ``rows`` are given."""
    pages, rows = call.sizes["P"], call.sizes["R"]
    fits = call["rows"] is not None or rows == pages
    return "" if fits else f"source.k has P={rows}, expected {pages}"


def exact_in(call: Call, name: str) -> str:
    """For digests that hold elements of K: same dtype as K, or any model dtype if K is fp8."""
    kv, digest = call.dtypes["kv"], call.dtypes["digest"]
    fits = kv == digest or kv.itemsize == 1
    return "" if fits else f"{name} has dtype {digest}, expected {kv}"


def given_rows(call: Call) -> str:
    """Reason why the C++ code, which reads host pages, does not take ``rows``: those index device slots."""
    return (
        "" if call["rows"] is None else "rows are given; native reads a page in the row of its id"
    )


def _valid(call: Call) -> str:
    return exact_in(call, "kmin") or same_rows(call)


@op(_valid, tolerances=TOLERANCES)
def build_layer_digests(
    source: Annotated[LayerPages, "L R S H D kv"],
    ids: Annotated[torch.Tensor, "n int64"],
    kmin: Annotated[torch.Tensor, "L P H D digest"],
    kmax: Annotated[torch.Tensor, "L P H D digest"],
    rows: Annotated[torch.Tensor | None, "L n int64"] = None,
) -> None:
    """Write the digests of pages ``ids`` in every layer; all other rows are unchanged.

    m_d = min_t K[t, d], M_d = max_t K[t, d] over the tokens t of the page. One launch for all layers.

    Args:
        source: K of each layer; the pages in ``ids`` are full. R is P without ``rows``.
        ids: in [0, P); n may be 0.
        kmin, kmax: dtype of K, or a wider one if K is fp8; mutated.
        rows: in [0, R), the row of each page's K in each layer of ``source``; None: the row of its id.
    Source: Quest section 3.3, ScoutAttention section 3.2.
    """
    for layer, k in enumerate(source_rows(source.k, ids, rows)):
        low, high = torch.aminmax(k.to(kmin.dtype), dim=1)
        kmin[layer].index_copy_(0, ids, low.to(kmin.device))
        kmax[layer].index_copy_(0, ids, high.to(kmax.device))


@functools.cache
def _values(dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """[256] the values of fp8 bytes, with the NaN of e4m3 as 480; not used for other dtypes."""
    if dtype.itemsize > 1:
        return torch.zeros(256, dtype=to)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    if dtype == torch.float8_e4m3fn:
        values[127], values[255] = 480.0, -480.0
    return values.to(to)


@build_layer_digests.native(sizes=HEAD_DIMS, unless=given_rows)
def _build_layer_digests_native(source, ids, kmin, kmax, rows):
    _native.digest_layers(source.k, ids, _values(source.k[0].dtype, kmin.dtype), kmin, kmax)


build_layer_digests.triton("pages", sizes=triton.PAGES)
