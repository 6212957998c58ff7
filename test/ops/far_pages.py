"""Pools of which only the last pages are ever touched: an address range, not memory."""

import mmap

import torch

from sglang_scout.ops import rotated
from sglang_scout.ops.pages import LayerPages

N, S, H, D = 3, 32, 1, 16
KV_AT, WORDS_AT, DIGESTS_AT, PLANES_AT = 2**23, 2**24, 2**28, 2**27
"""The page behind 2^32 elements: of K or V, of these as 32-bit words, of digests with D elements, with 2 D."""
MAP_NORESERVE = 0x4000  # in the module mmap since Python 3.13
TABLE, COUNT = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([N], dtype=torch.int32)
IDS, ZERO = TABLE[0].long(), torch.zeros(1, dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def pool(first: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[first + N, *shape] of zeros that take no memory; floats: the last N are random."""
    nbytes = (first + N) * torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = torch.frombuffer(mmap.mmap(-1, nbytes, flags), dtype=dtype).view(-1, *shape)
    if dtype.is_floating_point:
        pages[first:] = random(N, *shape)
    return pages


def kv(first: int = KV_AT) -> tuple[torch.Tensor, torch.Tensor]:
    return pool(first, S, H, D), pool(first, S, H, D)


def rotated_digests() -> tuple[torch.Tensor, ...]:
    shapes = rotated.planes_shape(D), (D + rotated.STATS_BYTES,)
    pools = tuple(pool(PLANES_AT, H, *shape, dtype=torch.uint8) for shape in shapes)
    keys = LayerPages.of([random(N, S, H, D)], [random(N, S, H, D) + 1], "cpu")
    last = (x[None, PLANES_AT:] for x in pools)
    rotated.build_layer_rotated_reference(keys, torch.arange(N), *last)
    return pools


QUERY = random(1, 2, D).bfloat16()


def equal(far: object, near: object) -> None:
    pairs = [(far, near)] if isinstance(far, torch.Tensor) else zip(far, near, strict=True)
    for got, want in pairs:
        assert torch.equal(got, want) and want.float().abs().sum() > 0
