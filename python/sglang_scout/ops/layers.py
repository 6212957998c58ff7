"""The pages of all layers, as the ops take them that read any layer in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

KV_DTYPE_NAMES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""What K and V may be stored in."""


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are exact in every type of a model."""
    return dtype.itemsize == 1


@dataclass(frozen=True, repr=False)
class LayerPages:
    """The pages of all layers, each layer's K and V where they happen to lie.

    Attributes:
        k, v: per layer ``[P, ...]``, contiguous, of one shape and dtype; any device.
        addresses: ``[2, L]`` int64, where K and V of each layer begin, for kernels: on their device.
        align_bytes: that all of them are multiples of, 16 at most.
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
        for name, planes in (("k", k), ("v", v)):
            for layer, plane in enumerate(planes):
                if plane.shape != k[0].shape or plane.dtype != k[0].dtype:
                    raise ValueError(
                        f"LayerPages: {name}[{layer}] is {plane.dtype}{list(plane.shape)}, "
                        f"expected {k[0].dtype}{list(k[0].shape)}"
                    )
                if not plane.is_contiguous():
                    raise ValueError(
                        f"LayerPages: {name}[{layer}] is not contiguous, strides {plane.stride()}"
                    )
        addresses = [[plane.data_ptr() for plane in planes] for planes in (k, v)]
        parts = [*addresses[0], *addresses[1], k[0][:1].nbytes, 16]
        align_bytes = min(part & -part for part in parts if part)
        return cls(list(k), list(v), torch.tensor(addresses, device=device), align_bytes)

    def shares_memory_with(self, *targets: torch.Tensor) -> bool:
        """Whether a target lies in the storage of K or V; one layer stands for all, which come from one arena."""
        own = {half[0].untyped_storage().data_ptr() for half in (self.k, self.v)}
        return any(target.untyped_storage().data_ptr() in own for target in targets)

    def __repr__(self) -> str:
        return f"{len(self.k)} layers of {self.k[0].dtype}{list(self.k[0].shape)}"


def source_rows(
    planes: Sequence[torch.Tensor], ids: torch.Tensor, rows: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """K or V of each layer, [n, S, H, D], gathered: the rows ``ids``, or the layer's of ``rows``."""
    for layer, x in enumerate(planes):
        yield x.index_select(0, (ids if rows is None else rows[layer]).to(x.device))


def resident_slots(slot_of: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    """[B, n] int32 slots of pages [B, n] int32, -1 where a page is none or has none; without
    ``slot_of`` [I] int32 the pages themselves."""
    if slot_of is None:
        return pages
    slots = slot_of.index_select(0, pages.clamp(min=0).flatten())
    return slots.view_as(pages).masked_fill_(pages < 0, -1)
