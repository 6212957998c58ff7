"""Copy selected pages of one layer from the host into staging slots, driven entirely by the device."""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import native, triton
from .layers import LayerPages
from .op import Call, op

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "bytes are copied") for name in ("float32", "bfloat16", "float16")
}


def _valid(call: Call) -> str:
    sizes = call.sizes
    if not 0 <= call["layer"] < sizes["L"]:
        return f"layer is {call['layer']}, expected a value in [0, {sizes['L']})"
    if sizes["slots"] < sizes["R"] * sizes["k"]:
        return f"there are {sizes['slots']} slots for {sizes['R']} lists of {sizes['k']} pages"
    if sizes["H"] % max(sizes["h"], 1) or sizes["R"] * sizes["h"] % max(sizes["H"], 1):
        return f"{sizes['R']} lists of {sizes['h']} of {sizes['H']} heads each do not make whole requests"
    return ""


@op(
    _valid,
    source="L P S H d kv",
    pages="R k int32",
    dst_k="slots S h d kv",
    dst_v="slots S h d kv",
    tolerances=TOLERANCES,
)
def stage_pages(
    source: LayerPages,
    layer: int,
    pages: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
) -> None:
    """Copy K and V of page ``pages[r, i]`` of ``layer`` to slot r * k + i.

    If a slot has fewer heads than a page, a request has C = H / h lists, and list r % C copies only its own heads.

    Args:
        source: the pages, on any device; kernels read pinned host memory.
        layer: in [0, L).
        pages: [R, k] int32 below P; negative entries are skipped.
        dst_k, dst_v: [slots, S, h, D], at least R * k slots; mutated, on their device's current stream.
    Source: prefetching of ScoutAttention's recall-based baseline (section 2.3); the operation itself is ours.
    """
    rows, columns = (pages >= 0).nonzero(as_tuple=True)
    lists, k = source.k[0].shape[2] // dst_k.shape[2], pages.shape[1]
    named = pages[rows, columns]
    for plane, dst in ((source.k[layer], dst_k), (source.v[layer], dst_v)):
        by_list = plane.unflatten(2, (lists, -1))  # [P, S, C, h, D]
        at = (x.to(plane.device) for x in (named, rows % lists))
        page, which = at
        dst[rows * k + columns] = by_list[page, :, which].to(dst.device)


def _heads(call: Call) -> str:
    sizes = call.sizes
    return "native copies whole pages" if sizes["h"] != sizes["H"] else ""


@native.implements(stage_pages, dtypes=None, unless=_heads)
def _native(source, layer, pages, dst_k, dst_v):
    named = pages.flatten()
    slots = (named >= 0).nonzero().flatten()
    named = named[slots].long()
    native.check_ids("stage_pages", "pages", named, source.k[0].shape[0])
    at = dst_k[:1].nbytes, named.data_ptr(), slots.data_ptr(), len(slots)
    native.module.copy_pages(source.k[layer].data_ptr(), dst_k.data_ptr(), *at)
    native.module.copy_pages(source.v[layer].data_ptr(), dst_v.data_ptr(), *at)


triton.implements(stage_pages, "stage", pinned=("source.k",), dtypes=None)
