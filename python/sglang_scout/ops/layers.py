"""The pages of all layers, for ops that read any layer in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

KV_DTYPE_NAMES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Storage dtypes of K and V."""


@dataclass(frozen=True, repr=False)
class LayerPages:
    """The pages of all layers, with each layer's K and V at any address.

    Attributes:
        k, v: per layer ``[P, ...]``, contiguous, of one shape and dtype; any device.
        addresses: ``[2, L]`` int64 on the kernels' device, the base addresses of K and V of each layer.
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
            found = f"{plane.dtype}{list(plane.shape)}, "
            found += "contiguous" if plane.is_contiguous() else f"strides {plane.stride()}"
            if found != expected:
                name = f"k[{i}]" if i < len(k) else f"v[{i - len(k)}]"
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
