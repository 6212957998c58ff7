"""Page digests: elementwise minimum and maximum of a page's keys (Quest, section 3.3).

ScoutAttention (section 3.2) keeps the digest of every page on the GPU and scores pages by it alone.
Keys are stored after RoPE, so digests are too.
"""

from __future__ import annotations

from typing import Annotated

import torch

from . import native, triton
from .layers import KV_DTYPE_NAMES, LayerPages, is_fp8, source_rows
from .op import Call, Tolerance, op

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "a minimum is one of the inputs: nothing is rounded")
    for name in KV_DTYPE_NAMES
}


def same_rows(call: Call) -> str:
    """For ops that read each page at the row of its id, unless ``rows`` are given."""
    pages, rows = call.sizes["P"], call.sizes["R"]
    return (
        f"source.k has P={rows}, expected {pages}" if call["rows"] is None and rows != pages else ""
    )


def exact_in(call: Call, name: str) -> str:
    """For digests that hold elements of K: same dtype as K, or any model dtype if K is fp8."""
    kv, digest = call.dtypes["kv"], call.dtypes["digest"]
    if kv == digest or is_fp8(kv):
        return ""
    return f"{name} has dtype {digest}, expected {'a wider float' if is_fp8(kv) else kv}"


def given_rows(*arguments: object) -> str:
    """Reason why the C++ code, which reads host pages, does not take ``rows``, the fifth: those index device slots."""
    return (
        "" if arguments[4] is None else "rows are given; native reads a page in the row of its id"
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

    m_d = min_t K[t, d], M_d = max_t K[t, d] over the tokens t of the page. One launch on a device,
    regardless of the number of layers.

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


@build_layer_digests.native(sizes=native.HEAD_DIMS, unless=given_rows)
def _native(source, ids, kmin, kmax, rows):
    P, S, H, D = source.k[0].shape
    native.check_ids("build_layer_digests", ids=(ids, P))
    for k, low, high in zip(source.k, kmin, kmax, strict=True):
        of_keys = k.data_ptr(), S, H, D, native.KV_DTYPES[k.dtype], ids.data_ptr(), ids.numel()
        native.module.digest_pages(
            *of_keys, native.DTYPES[low.dtype], low.data_ptr(), high.data_ptr()
        )


build_layer_digests.triton("pages", sizes=triton.PAGES)
