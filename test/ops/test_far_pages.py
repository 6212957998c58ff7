"""Pages whose offset in elements is beyond 32 bits, as in a pool of 65,536 pages of 32 tokens, 8 heads of 128.

Each pool is an address range of which only the last pages are ever touched. They are at 2^32 elements exactly: an
offset computed in 32 bits is that of the first pages, which are zeros.
"""

import mmap

import pytest
import torch

from sglang_scout.ops import rotated
from sglang_scout.ops import triton as kernels
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.pages import Pool
from sglang_scout.policy.hgca import kernels as hgca_kernels
from sglang_scout.policy.learned import kernels as learned_kernels

pytestmark = pytest.mark.skipif(not kernels.interpreted(), reason="needs Triton's interpreter")

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
    shapes = rotated.planes_shape(2, D), (D + rotated.STATS_BYTES,)
    pools = tuple(pool(PLANES_AT, H, *shape, dtype=torch.uint8) for shape in shapes)
    keys = LayerPages.of([random(N, S, H, D)], [random(N, S, H, D) + 1], "cpu")
    last = (x[None, PLANES_AT:] for x in pools)
    rotated.build_layer_rotated_reference(keys, torch.arange(N), *last)
    return pools


QUERY = random(1, 2, D).bfloat16()
READS = {
    kernels.attend.attend_pages: (KV_AT, kv, lambda x, to: (QUERY, *x, TABLE + to, ZERO + to, COUNT, 0.25)),
    kernels.score.score_pages: (
        DIGESTS_AT, lambda: (pool(DIGESTS_AT, H, D), pool(DIGESTS_AT, H, D)),
        lambda x, to: (QUERY, *x, TABLE + to, COUNT, 0.25),
    ),
    kernels.rotated_scores.score_rotated: (
        PLANES_AT, rotated_digests, lambda x, to: (QUERY, *x, TABLE + to, COUNT, 0.25)
    ),
    kernels.rotated_scores.mass_change_rotated: (
        PLANES_AT, rotated_digests, lambda x, to: (QUERY, QUERY + 1, *x, TABLE + to, COUNT, 0.25)
    ),
    learned_kernels.score_embeddings: (
        PLANES_AT, lambda: [pool(PLANES_AT, H, 2, D)],
        lambda x, to: (QUERY[:, 0].contiguous(), *x, TABLE + to, COUNT),
    ),
}  # fmt: skip


def equal(far: object, near: object) -> None:
    pairs = [(far, near)] if isinstance(far, torch.Tensor) else zip(far, near, strict=True)
    for got, want in pairs:
        assert torch.equal(got, want) and want.float().abs().sum() > 0


@pytest.mark.parametrize("op", READS, ids=lambda op: op.__name__)
def test_reads(op):
    first, pools, arguments = READS[op]
    pools = pools()
    far = op(*arguments(pools, first))
    equal(far, op(*arguments([x[first:] for x in pools], 0)))


def test_reads_of_moving_averages():
    k = pool(KV_AT, S, H, D)
    far, near = (torch.zeros(1, 4, H, S) for _ in range(2))
    for pages, at, maw in ((k, KV_AT, far), (k[KV_AT:], 0, near)):
        window = TABLE[:, :2], COUNT - 1, torch.arange(N, dtype=torch.int32) + at, ZERO + 1 + at
        arguments = QUERY, ZERO + random(1, 2), pages, *window, COUNT, ZERO, ZERO, ZERO, maw
        hgca_kernels.decay_mass(*arguments, 0.1, 0.25)
    equal(far, near)


def test_appended_tokens():
    k, v, own, mirror = *(random(1, H, D).bfloat16() for _ in "kv"), kv(), kv()
    for pages in own + mirror:
        pages[KV_AT:] = 0
    pools = (Pool(*x, ZERO + KV_AT + i) for i, x in ((1, own), (2, mirror)))
    kernels.pages.append_tokens(k, v, COUNT, *pools)
    for i, (pages, token) in {1: (own[0], k), 2: (mirror[1], v)}.items():
        equal(pages[KV_AT + i, N - 1], token[0])


def test_copies_from_and_to():
    source, to = kv(WORDS_AT), kv(WORDS_AT)
    layers = LayerPages.of(*([x] for x in source), "cpu")
    ids = torch.stack([IDS * 0, IDS + WORDS_AT, IDS.flip(0) + WORDS_AT])
    kernels.pages.copy_layer_pages(layers, ids, *(x[None] for x in to))
    equal([x[WORDS_AT:][IDS.flip(0)] for x in to], [x[WORDS_AT:][IDS] for x in source])
    staged = [torch.zeros(N, S, H, D, dtype=torch.bfloat16) for _ in range(2)]
    kernels.pages.stage_pages(layers, 0, TABLE + WORDS_AT, *staged)
    equal(staged, [x[WORDS_AT:][IDS] for x in source])


BUILDS = {
    kernels.pages.build_layer_digests: (
        DIGESTS_AT,
        lambda: [pool(DIGESTS_AT, H, D) for _ in range(2)],
    ),
    kernels.rotated.build_layer_rotated: (PLANES_AT, rotated_digests),
    learned_kernels.build_layer_means: (PLANES_AT, lambda: [pool(PLANES_AT, H, 2, D)]),
    learned_kernels.build_layer_pilots: (PLANES_AT, lambda: [pool(PLANES_AT, H, 1, 32)]),
}


@pytest.mark.parametrize("op", BUILDS, ids=lambda op: op.__name__)
def test_digests_from_and_to(op):
    at, pools = BUILDS[op]
    source, to = kv(), pools()
    more = (random(1, H, 32, 2 * D),) if op is learned_kernels.build_layer_pilots else ()
    near = [x[None, at:].clone() for x in to]
    layers = LayerPages.of(*([x] for x in source), "cpu")
    op(layers, IDS + at, *(x[None] for x in to), *more, rows=IDS[None] + KV_AT)
    layers = LayerPages.of(*([x[KV_AT:]] for x in source), "cpu")
    op(layers, IDS, *near, *more, rows=IDS[None])
    equal([x[None, at:] for x in to], near)
