"""`copy_layer_pages` from the host by the copy engines, which leave all SMs to the step.

One CUDA runtime call copies all pages, through ctypes: `cuda.bindings` creates an object per address, which takes ms
for 2,000 copies. The kernel copies instead during graph capture, which would drop the copies, and for small pages,
which the engines copy at a tenth of the bus bandwidth (one report, of an H100)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import native
from .layers import LayerPages

# Host memory is pinned in ranges of 4 GiB, and a copy must not span two. Planes begin a whole number of huge pages
# after the first range (sgl-kernel/src/ring.h), so no page spans two if its size divides these and all strides.
_PAGE_BYTES = range(1 << 16, (1 << 21) + 1)
# cudaMemcpyAttributes: source access in stream order; no location hints; prefer overlap with compute.
_ATTRIBUTES, _FIRST = np.array([1, 0, 0, 0, 0, 1], np.int32), np.zeros(1, np.int64)


@functools.cache
def runtime() -> Any:
    """Raises OSError without CUDA 13; earlier versions have a different signature."""
    call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
    return call


def unless(source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, _: torch.Tensor) -> str:
    page_bytes, addresses = dst_k[:1, :1].nbytes, _addresses(source)
    if ids.is_cuda or not source.k[0].is_pinned():
        return "ids or pages are not on the host, or pages are not page-locked"
    if page_bytes not in _PAGE_BYTES or page_bytes.bit_count() != 1:
        return f"pages of {page_bytes} bytes; memcpy supports powers of two from 65536 to 2097152"
    if ((addresses - addresses[0, 0]) % page_bytes).any():
        return "layers do not lie whole pages apart"
    if torch.cuda.is_current_stream_capturing():
        return "a capture would drop the copies"
    if torch.cuda.current_stream().cuda_stream == 0:
        return "the current stream is the default one, which memcpy does not support"
    try:
        runtime()
    except OSError as error:
        return str(error)
    return ""


def _addresses(source: LayerPages) -> npt.NDArray[np.int64]:
    """[2, L] base addresses of K and V, on the host."""
    return np.array([[x.data_ptr() for x in half] for half in (source.k, source.v)])


def check(source: LayerPages, ids: torch.Tensor, dst: torch.Tensor) -> None:
    """Raise ValueError unless the layers, pages and slots of ``ids`` exist."""
    layers, pages, slots = zip(ids, (len(source.k), len(source.k[0]), dst.shape[1]), strict=True)
    native.check_ids("copy_layer_pages", layers=layers, pages=pages, slots=slots)


def copy(source: LayerPages, ids: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor) -> None:
    """See `ops.pages.copy_layer_pages`."""
    ids = ids[:, ids[1] >= 0]
    check(source, ids, dst_k)
    (layers, pages, slots), page_bytes = ids.numpy(), dst_k[:1, :1].nbytes
    if len(pages) == 0:
        return
    # All K, then all V.
    src = (_addresses(source)[:, layers] + pages * page_bytes).ravel()
    to = (layers * dst_k.shape[1] + slots) * page_bytes
    dst = np.concatenate([x.data_ptr() + to for x in (dst_k, dst_v)])
    sizes = np.full_like(src, page_bytes)  # kept in a variable so that it outlives the call
    batch = dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(src)
    attributes = _ATTRIBUTES.ctypes.data, _FIRST.ctypes.data, 1
    code = runtime()(*batch, *attributes, torch.cuda.current_stream().cuda_stream)
    if code != 0:
        raise RuntimeError(
            f"copy_layer_pages: cudaMemcpyBatchAsync of {len(src)} pages: CUDA error {code}"
        )
