"""Copy whole pages between two pools (recall into resident slots), of one layer or of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.registry import Op, Tolerance
from . import native, triton
from .shapes import Shapes

TOLERANCES = {
    name: Tolerance(0.0, 0.0, "bytes are copied") for name in ("float32", "bfloat16", "float16")
}


def copy_pages_reference(
    src: torch.Tensor, src_ids: torch.Tensor, dst: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """`copy_pages` as gather, move, scatter: dst[dst_ids[i]] = src[src_ids[i]]."""
    pages = src.index_select(0, src_ids.to(src.device)).to(dst.device)
    dst.index_copy_(0, dst_ids.to(dst.device), pages)


def _check(
    src: torch.Tensor, src_ids: torch.Tensor, dst: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    shapes = Shapes("copy_pages")
    shapes.bind("src_ids", src_ids, "n", torch.int64)
    shapes.bind("dst_ids", dst_ids, "n", torch.int64)
    if src.dtype != dst.dtype or src.shape[1:] != dst.shape[1:] or src.dim() < 1:
        shapes.fail(
            f"dst has pages {dst.dtype}{list(dst.shape[1:])}, "
            f"expected {src.dtype}{list(src.shape[1:])}"
        )


COPY_PAGES = Op(
    "copy_pages",
    copy_pages_reference,
    [native.COPY_PAGES, triton.COPY_PAGES],
    check=_check,
    tolerances=TOLERANCES,
)


def copy_pages(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    dst: torch.Tensor,
    dst_ids: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Copy page src_ids[i] of ``src`` to page dst_ids[i] of ``dst``; other pages stay as they are.

    Args:
        src: [P, ...] any dtype, any device.
        src_ids: [n] int64 in [0, P); n may be 0.
        dst: [Ns, ...] dtype and page shape of ``src``; mutated, on its device's current stream.
        dst_ids: [n] int64 in [0, Ns), no id twice.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: recall of ScoutAttention section 3.4; the operation itself is ours.
    """
    COPY_PAGES(src, src_ids, dst, dst_ids, impl=impl)


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
        """Pages for copies to ``device``.

        Raises:
            ValueError: no layers, or layers of different shape, dtype or layout.
        """
        shapes = Shapes("LayerPages")
        if len(k) != len(v) or not k:
            shapes.fail(f"{len(k)} layers of K, {len(v)} of V; expected as many, and at least one")
        for name, planes in (("k", k), ("v", v)):
            for layer, plane in enumerate(planes):
                if plane.shape != k[0].shape or plane.dtype != k[0].dtype:
                    shapes.fail(
                        f"{name}[{layer}] is {plane.dtype}{list(plane.shape)}, "
                        f"expected {k[0].dtype}{list(k[0].shape)}"
                    )
                if not plane.is_contiguous():
                    shapes.fail(f"{name}[{layer}] is not contiguous, strides {plane.stride()}")
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


def copy_layer_pages_reference(
    source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> None:
    """`copy_layer_pages` as one `copy_pages` for each layer, K and V."""
    layers, pages, slots = ids.cpu()
    for layer in layers.unique().tolist():
        here = layers == layer
        for planes, dst in ((source.k, dst_k), (source.v, dst_v)):
            copy_pages_reference(planes[layer], pages[here], dst[layer], slots[here])


def _check_layers(
    source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor
) -> None:
    shapes = Shapes("copy_layer_pages")
    if ids.dtype != torch.int64 or ids.dim() != 2 or len(ids) != 3:
        shapes.fail(f"ids is {ids.dtype}{list(ids.shape)}, expected torch.int64[3, n]")
    page = source.k[0]
    for name, dst in (("dst_k", dst_k), ("dst_v", dst_v)):
        if dst.dtype != page.dtype or dst.dim() < 2 or dst.shape[2:] != page.shape[1:]:
            shapes.fail(
                f"{name} has pages {dst.dtype}{list(dst.shape[2:])}, "
                f"expected {page.dtype}{list(page.shape[1:])}"
            )
        if len(dst) != len(source.k) or dst.shape != dst_k.shape:
            shapes.fail(f"{name} is {list(dst.shape)}, expected {len(source.k)} layers, as dst_k")


COPY_LAYER_PAGES = Op(
    "copy_layer_pages",
    copy_layer_pages_reference,
    [native.COPY_LAYER_PAGES, triton.COPY_LAYER_PAGES],
    check=_check_layers,
    tolerances=TOLERANCES,
)


def copy_layer_pages(
    source: LayerPages,
    ids: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Copy K and V of pages of any layers: page ids[1, i] of layer ids[0, i] goes to slot ids[2, i].

    On a device one launch, whatever the number of layers.

    Args:
        source: the pages; no memory of the targets.
        ids: [3, n] int64: layers in [0, L), pages in [0, P), slots in [0, Ns); n may be 0, no (layer,
            slot) twice, a page as often as you like.
        dst_k, dst_v: [L, Ns, ...] dtype and page shape of ``source``, contiguous; mutated, on their
            device's current stream.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    Source: recall of ScoutAttention section 3.4; the operation itself is ours.
    """
    COPY_LAYER_PAGES(source, ids, dst_k, dst_v, impl=impl)
