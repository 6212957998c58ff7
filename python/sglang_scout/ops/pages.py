"""Copies of whole pages and of single tokens, between layers' pages and the device's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch

from . import native, triton
from .layers import KV_DTYPE_NAMES, LayerPages
from .op import Call, Tolerance, op

_COPIED = dict.fromkeys(KV_DTYPE_NAMES, Tolerance(0.0, 0.0, "bytes are copied"))
_ONCE = Tolerance(0.0, 0.0, "one rounding to the dtype of the pages, to the nearest even")
_ROUNDED = dict.fromkeys(KV_DTYPE_NAMES, _ONCE)


class Pool(NamedTuple):
    """Where to append: pages of K and V [P, S, H, D], and the page id of each row [B] int32 (negative: none)."""

    k: torch.Tensor
    v: torch.Tensor
    ids: torch.Tensor


@op(tolerances=_ROUNDED)
def append_tokens(
    k: Annotated[torch.Tensor, "B H D new"],
    v: Annotated[torch.Tensor, "B H D new"],
    lens: Annotated[torch.Tensor, "B int32"],
    pool: Annotated[Pool, ("P S H D kv", "P S H D kv", "B int32")],
    mirror: Annotated[Pool | None, ("M S H D kv", "M S H D kv", "B int32")] = None,
) -> None:
    """Write each request's new token to the end of its partially filled page.

    pages[ids[b], lens[b] - 1] = new[b] where ids[b] >= 0. fp8 is rounded as by torch's and SGLang's ``.to``: values out
    of range become inf in e5m2, and NaN in e4m3 (448 since torch 2.14).

    Args:
        k, v: rows may be strided, as views of a fused projection are.
        lens: tokens in the page including the new one, 1..S.
        pool: the resident slots; mutated.
        mirror: the host pages, with their own page ids; mutated. On a CUDA device they are pinned memory that the
            device can write. Page ids must be distinct.
    Source: the operation is ours (step 4 of the decode step in docs/architecture.md).
    """
    for pages_k, pages_v, ids in (pool,) if mirror is None else (pool, mirror):
        rows = (ids >= 0).nonzero().squeeze(1)
        at = [x.to(pages_k.device) for x in (ids[rows].long(), lens[rows].long() - 1)]
        for new, pages in ((k, pages_k), (v, pages_v)):
            pages[at[0], at[1]] = new[rows].to(pages.device, pages.dtype)


append_tokens.triton("pages", sizes=triton.HEAD_DIMS, strided_rows=("k", "v"))


@op(tolerances=_COPIED)
def copy_layer_pages(
    source: Annotated[LayerPages, "L P S H D any"],
    ids: Annotated[torch.Tensor, "3 n int64"],
    dst_k: Annotated[torch.Tensor, "L slots S H D any"],
    dst_v: Annotated[torch.Tensor, "L slots S H D any"],
) -> None:
    """Copy K and V of pages of any layers: page ids[1, i] of layer ids[0, i] goes to slot ids[2, i].

    One launch for all layers.

    Args:
        source: on any device, of other memory than the targets.
        ids: on the host: layers in [0, L), pages below P (negative ones are skipped), slots in [0, Ns);
            n may be 0, (layer, slot) pairs must be distinct, pages may repeat.
        dst_k, dst_v: mutated, on their device's current stream.
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


def _copy_rows(
    layers: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    row_bytes: int,
    *halves: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
) -> None:
    """Copy ``rows`` [n] of ``layers`` [n] to ``targets`` [n] in each (source, target) by the C++ code, unchecked."""
    begin = 0
    runs = layers.unique_consecutive(return_counts=True)
    for layer, count in zip(*(x.tolist() for x in runs), strict=True):
        at = rows[begin:].data_ptr(), targets[begin:].data_ptr(), count
        for source, target in halves:
            native.module.copy_pages(
                source[layer].data_ptr(), target[layer].data_ptr(), row_bytes, *at
            )
        begin += count


@copy_layer_pages.native()
def _copy_layer_pages(source, ids, dst_k, dst_v):
    layers, pages, slots = ids[:, ids[1] >= 0]
    of_layers, of_slots = (layers, len(source.k)), (slots, dst_k.shape[1])
    of_pages = pages, len(source.k[0])
    native.check_ids("copy_layer_pages", layers=of_layers, pages=of_pages, slots=of_slots)
    _copy_rows(layers, pages, slots, dst_k[:1, :1].nbytes, (source.k, dst_k), (source.v, dst_v))


copy_layer_pages.triton("pages", on_host=("ids",))


def _valid_lists(call: Call) -> str:
    L, slots, R, k, H, h = (call.sizes[name] for name in ("L", "slots", "R", "k", "H", "h"))
    if not 0 <= call["layer"] < L:
        return f"layer is {call['layer']}, expected a value in [0, {L})"
    if slots < R * k:
        return f"there are {slots} slots for {R} lists of {k} pages"
    if H % max(h, 1) or R * h % max(H, 1):
        return f"{R} lists of {h} of {H} heads each do not make whole requests"
    return ""


@op(_valid_lists, tolerances=_COPIED)
def stage_pages(
    source: Annotated[LayerPages, "L P S H D any"],
    layer: int,
    pages: Annotated[torch.Tensor, "R k int32"],
    dst_k: Annotated[torch.Tensor, "slots S h D any"],
    dst_v: Annotated[torch.Tensor, "slots S h D any"],
) -> None:
    """Copy K and V of page ``pages[r, i]`` of ``layer`` to slot r * k + i, driven entirely by the device.

    If a slot has fewer heads than a page, a request has C = H / h lists, and list r % C copies only its own heads.

    Args:
        source: the pages, on any device; kernels read pinned host memory.
        layer: in [0, L).
        pages: below P; negative entries are skipped.
        dst_k, dst_v: at least R * k slots; mutated, on their device's current stream.
    Source: prefetching of ScoutAttention's recall-based baseline (section 2.3); the operation itself is ours.
    """
    rows, columns = (pages >= 0).nonzero(as_tuple=True)
    lists, k = source.k[0].shape[2] // dst_k.shape[2], pages.shape[1]
    named = pages[rows, columns]
    for plane, dst in ((source.k[layer], dst_k), (source.v[layer], dst_v)):
        by_list = plane.unflatten(2, (lists, -1))  # [P, S, C, h, D]
        page, which = (x.to(plane.device) for x in (named, rows % lists))
        dst[rows * k + columns] = by_list[page, :, which].to(dst.device)


def _by_head(call: Call) -> str:
    return "native copies whole pages" if call.sizes["h"] != call.sizes["H"] else ""


@stage_pages.native(unless=_by_head)
def _stage_pages(source, layer, pages, dst_k, dst_v):
    named = pages.flatten()
    slots = (named >= 0).nonzero().flatten()
    named = named[slots].long()
    native.check_ids("stage_pages", pages=(named, source.k[0].shape[0]))
    halves = (source.k[layer:], [dst_k]), (source.v[layer:], [dst_v])
    _copy_rows(torch.zeros_like(slots), named, slots, dst_k[:1].nbytes, *halves)


stage_pages.triton("pages")


@op(tolerances=_COPIED)
def copy_tokens(
    source: Annotated[LayerPages, "L P S H D any"],
    ids: Annotated[torch.Tensor, "3 m int64"],
    target: Annotated[LayerPages, "L C S D any"],
) -> None:
    """Copy K and V of single tokens and heads from host pages into pages of one head.

    Args:
        ids: layers ascending, source (page S + token) H + head, target page S + token.
        target: mutated.
    Source: Deng et al., section 3.3, each head's entries contiguously.
    """
    layers, rows, targets = ids
    for layer in layers.unique().tolist():
        here = layers == layer
        for planes, dst in ((source.k, target.k), (source.v, target.v)):
            # As bytes: torch cannot index_copy fp8.
            flat, to = (x[layer].view(torch.uint8).flatten(0, -2) for x in (planes, dst))
            to.index_copy_(0, targets[here], flat.index_select(0, rows[here]))


@copy_tokens.native()
def _copy_tokens(source, ids, target):
    layers, rows, targets = ids
    token_bytes = source.k[0].shape[-1] * source.k[0].element_size()
    ends = [x[0].shape[:-1].numel() for x in (source.k, target.k)]
    native.check_ids("copy_tokens", layers=(layers, len(source.k)))
    native.check_ids("copy_tokens", sources=(rows, ends[0]), targets=(targets, ends[1]))
    _copy_rows(layers, rows, targets, token_bytes, (source.k, target.k), (source.v, target.v))
