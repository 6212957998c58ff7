"""The pages of all layers, for ops that read any layer in one launch; copies of whole pages and of single tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from .. import _native
from . import triton as kernels


@dataclass(frozen=True, repr=False)
class LayerPages:
    """Each layer's K and V, at any address.

    Attributes:
        k, v: per layer ``[P, ...]``, contiguous, of one shape and dtype; any device.
        addresses: ``[2, L]`` int64 on the kernels' device, of K and V of each layer.
        align_bytes: common alignment of all addresses and pages, at most 16.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    addresses: torch.Tensor
    align_bytes: int

    @classmethod
    def of(
        cls, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor], device: torch.device | str
    ) -> LayerPages:
        """Pages as kernels on ``device`` read them.

        Raises:
            ValueError: no layers, or layers of different shape, dtype or layout.
        """
        if len(k) != len(v) or not k:
            raise ValueError(
                f"LayerPages: {len(k)} layers of K, {len(v)} of V; expected as many, 1 or more"
            )
        expected = f"{k[0].dtype}{list(k[0].shape)}, contiguous"
        for i, plane in enumerate((*k, *v)):
            layout = "contiguous" if plane.is_contiguous() else f"strides {plane.stride()}"
            if (found := f"{plane.dtype}{list(plane.shape)}, {layout}") != expected:
                half, layer = divmod(i, len(k))
                name = f"{'kv'[half]}[{layer}]"
                raise ValueError(f"LayerPages: {name} is {found}, expected {expected}")
        addresses = [[plane.data_ptr() for plane in planes] for planes in (k, v)]
        parts = [*addresses[0], *addresses[1], k[0][:1].nbytes, 16]
        align_bytes = min(part & -part for part in parts if part)
        return cls(list(k), list(v), torch.tensor(addresses, device=device), align_bytes)


def source_rows(
    planes: Sequence[torch.Tensor], ids: torch.Tensor, rows: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """K or V of each layer, [n, S, H, D], gathered from rows ``ids``, or from the layer's ``rows`` if given."""
    for layer, x in enumerate(planes):
        yield x.index_select(0, (ids if rows is None else rows[layer]).to(x.device))


def resident_slots(slot_of: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    """Slots of pages [B, n] int32, -1 for padding and non-resident pages; ``pages`` without ``slot_of`` [I] int32."""
    if slot_of is None:
        return pages
    slots = slot_of.index_select(0, pages.clamp(min=0).flatten())
    return slots.view_as(pages).masked_fill_(pages < 0, -1)


LARGEST = 2.0**50


def largest(dtype: torch.dtype) -> float:
    """Clamp for the magnitude of elements of K and of embeddings."""
    return min(LARGEST, torch.finfo(dtype).max)


def limited(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Clamped fp32, with NaN as 0."""
    most = largest(dtype)
    return x.float().nan_to_num(0.0, most, -most).clamp(-most, most)


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
        pool: mutated; page ids must be distinct.
        mirror: the host pages; mutated. On a CUDA device they are pinned memory that the device can write.
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
    """Copy K and V of pages of any layers: page ids[1, i] of layer ids[0, i] goes to slot ids[2, i]. One launch.

    Args:
        source: on any device, of other memory than the targets.
        ids: on the host; negative pages are skipped, (layer, slot) pairs must be distinct, pages may repeat.
        dst_k, dst_v: mutated, on their device's current stream.
    Source: recall of ScoutAttention section 3.4.
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
        source: on any device; kernels read pinned host memory.
        pages: below P; negative entries are skipped.
        dst_k, dst_v: at least R * k slots; mutated, on their device's current stream.
    Source: prefetching of ScoutAttention's recall-based baseline (section 2.3).
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
