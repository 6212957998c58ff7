"""Copy whole pages of any layers into resident slots, as recall (host-to-device prefetch) does."""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import native, triton
from .layers import LayerPages
from .memcpy import MEMCPY
from .op import Call, Tensors, op

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "bytes are copied") for name in ("float32", "bfloat16", "float16")
}


def _valid(call: Call) -> str:
    three = call.sizes["three"]
    return "" if three == 3 else f"ids has {three} rows, expected layers, pages and slots"


@op(
    _valid,
    ids="three n int64",
    source="L P ... kv",
    dst_k="L slots ... kv",
    dst_v="L slots ... kv",
    tolerances=TOLERANCES,
)
def copy_layer_pages(
    source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> None:
    """Copy K and V of pages of any layers: page ids[1, i] of layer ids[0, i] goes to slot ids[2, i].

    One launch, or one call to the copy engines, regardless of the number of layers.

    Args:
        source: the pages, on any device; kernels refuse memory that overlaps the targets.
        ids: [3, n] int64 on the host: layers in [0, L), pages below P (negative ones are skipped), slots in [0, Ns);
            n may be 0, (layer, slot) pairs must be distinct, pages may repeat.
        dst_k, dst_v: [L, Ns, ...] dtype and page shape of ``source``, contiguous; mutated, on their
            device's current stream.
    Source: recall of ScoutAttention section 3.4; the operation itself is ours.
    """
    layers, pages, slots = ids[:, ids[1] >= 0].cpu()
    named = layers.unique().tolist()
    if not all(0 <= layer < len(source.k) for layer in named):
        raise IndexError(f"layers are {named}, expected values in [0, {len(source.k)})")
    for layer in named:
        here = layers == layer
        for planes, dst in ((source.k, dst_k), (source.v, dst_v)):
            copied = planes[layer].index_select(0, pages[here].to(planes[layer].device))
            dst[layer].index_copy_(0, slots[here].to(dst.device), copied.to(dst.device))


def _shared(call: Call) -> str:
    if call["source"].shares_memory_with(call["dst_k"], call["dst_v"]):
        return "source and targets share memory; a kernel does not read all before it writes"
    return ""


@native.implements(copy_layer_pages, dtypes=None, unless=_shared)
def _native(source, ids, dst_k, dst_v):
    name, (layers, pages, slots) = "copy_layer_pages", ids[:, ids[1] >= 0]
    native.check_ids(name, "layers", layers, len(source.k))
    native.check_ids(name, "pages", pages, source.k[0].shape[0])
    native.check_ids(name, "slots", slots, dst_k.shape[1])
    page_bytes = dst_k[:1, :1].nbytes
    begin = 0
    runs = layers.unique_consecutive(return_counts=True)
    for layer, count in zip(*(x.tolist() for x in runs), strict=True):
        at = pages[begin:].data_ptr(), slots[begin:].data_ptr(), count
        for half, dst in ((source.k, dst_k), (source.v, dst_v)):
            native.module.copy_pages(half[layer].data_ptr(), dst[layer].data_ptr(), page_bytes, *at)
        begin += count


def _devices(tensors: Tensors) -> list[str]:
    return triton.device_reasons([x for x in tensors if x[0] != "ids"], ("source.k",))


copy_layer_pages.register(MEMCPY)
triton.implements(copy_layer_pages, "pages", devices=_devices, dtypes=None, unless=_shared)
