"""Copies of whole pages and of single tokens, between layers' pages and the device's slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from .. import _native
from . import triton as kernels
from .layers import LayerPages


class Pool(NamedTuple):
    """Where to append: pages of K and V [P, S, H, D], and the page id of each row [B] int32 (negative: none)."""

    k: Float[Tensor, "P S H D"]
    v: Float[Tensor, "P S H D"]
    ids: Int32[Tensor, " B"]


def append_tokens(
    k: Float[Tensor, "B H D"],
    v: Float[Tensor, "B H D"],
    lens: Int32[Tensor, " B"],
    pool: Pool,
    mirror: Pool | None = None,
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
    run = kernels.pages.append_tokens if k.is_cuda else append_tokens_reference
    run(k, v, lens, pool, mirror)


def append_tokens_reference(k, v, lens, pool, mirror=None):
    for pages_k, pages_v, ids in (pool,) if mirror is None else (pool, mirror):
        rows = (ids >= 0).nonzero().squeeze(1)
        at = [x.to(pages_k.device) for x in (ids[rows].long(), lens[rows].long() - 1)]
        for new, pages in ((k, pages_k), (v, pages_v)):
            pages[at[0], at[1]] = new[rows].to(pages.device, pages.dtype)


def copy_layer_pages(
    source: LayerPages,
    ids: Int64[Tensor, "3 n"],
    dst_k: Shaped[Tensor, "L slots S H D"],
    dst_v: Shaped[Tensor, "L slots S H D"],
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
    run = kernels.pages.copy_layer_pages if dst_k.is_cuda else _copy_layer_pages_native
    run(source, ids, dst_k, dst_v)


def copy_layer_pages_reference(source, ids, dst_k, dst_v):
    layers, pages, slots = ids[:, ids[1] >= 0].cpu()
    for layer in layers.unique().tolist():
        here = layers == layer
        for planes, dst in ((source.k, dst_k), (source.v, dst_v)):
            copied = planes[layer].index_select(0, pages[here].to(planes[layer].device))
            dst[layer].index_copy_(0, slots[here].to(dst.device), copied.to(dst.device))


def _copy_layer_pages_native(source, ids, dst_k, dst_v):
    _native.copy_layer_pages(source.k, source.v, ids, dst_k, dst_v)


def stage_pages(
    source: LayerPages,
    layer: int,
    pages: Int32[Tensor, "R k"],
    dst_k: Shaped[Tensor, "slots S h D"],
    dst_v: Shaped[Tensor, "slots S h D"],
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
    run = kernels.pages.stage_pages if dst_k.is_cuda else _stage_pages_native
    run(source, layer, pages, dst_k, dst_v)


def stage_pages_reference(source, layer, pages, dst_k, dst_v):
    rows, columns = (pages >= 0).nonzero(as_tuple=True)
    lists, k = source.k[0].shape[2] // dst_k.shape[2], pages.shape[1]
    named = pages[rows, columns]
    for plane, dst in ((source.k[layer], dst_k), (source.v[layer], dst_v)):
        by_list = plane.unflatten(2, (lists, -1))  # [P, S, C, h, D]
        page, which = (x.to(plane.device) for x in (named, rows % lists))
        dst[rows * k + columns] = by_list[page, :, which].to(dst.device)


def _stage_pages_native(source, layer, pages, dst_k, dst_v):
    _native.stage_pages(source.k[layer], source.v[layer], pages, dst_k, dst_v)


def copy_tokens(source: LayerPages, ids: Int64[Tensor, "3 m"], target: LayerPages) -> None:
    """Copy K and V of single tokens and heads between pages on the host.

    Args:
        ids: layers, source (page S + token) H + head, target page S + token.
        target: pages of one head, [C, S, D] per layer; mutated.
    Source: Deng et al., section 3.3, each head's entries contiguously.
    """
    _copy_tokens_native(source, ids, target)


def _copy_tokens_native(source, ids, target):
    _native.copy_tokens(source.k, source.v, ids, target.k, target.v)


def copy_tokens_reference(source, ids, target):
    layers, rows, targets = ids
    for layer in layers.unique().tolist():
        here = layers == layer
        for planes, dst in ((source.k, target.k), (source.v, target.v)):
            # As bytes: torch cannot index_copy fp8.
            flat, to = (x[layer].view(torch.uint8).flatten(0, -2) for x in (planes, dst))
            to.index_copy_(0, targets[here], flat.index_select(0, rows[here]))
