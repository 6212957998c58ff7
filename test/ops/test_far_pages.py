"""Pages whose offset in elements is beyond 32 bits, as in a pool of 65,536 pages of 32 tokens, 8 heads of 128.

Each pool is an address range of which only the last pages are ever touched. They are at 2^32 elements exactly: an
offset computed in 32 bits is that of the first pages, which are zeros.
"""

import pytest
import torch

from far_pages import (
    COUNT,
    DIGESTS_AT,
    IDS,
    KV_AT,
    PLANES_AT,
    QUERY,
    TABLE,
    WORDS_AT,
    ZERO,
    D,
    H,
    N,
    S,
    equal,
    kv,
    pool,
    random,
    rotated_digests,
)
from op_calls import of_policies
from sglang_scout.ops import triton as kernels
from sglang_scout.ops.pages import LayerPages, Pool

pytestmark = pytest.mark.skipif(not kernels.interpreted(), reason="needs Triton's interpreter")

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
    **of_policies("FAR_READS"),
}  # fmt: skip


@pytest.mark.parametrize("op", READS, ids=lambda op: op.__name__)
def test_reads(op):
    first, pools, arguments = READS[op]
    pools = pools()
    far = op(*arguments(pools, first))
    equal(far, op(*arguments([x[first:] for x in pools], 0)))


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
    **of_policies("FAR_BUILDS"),
}


@pytest.mark.parametrize("op", BUILDS, ids=lambda op: op.__name__)
def test_digests_from_and_to(op):
    at, pools = BUILDS[op]
    source, to = kv(), pools()
    more = (random(1, H, 32, 2 * D),) if op.__name__ == "build_layer_pilots" else ()
    near = [x[None, at:].clone() for x in to]
    layers = LayerPages.of(*([x] for x in source), "cpu")
    op(layers, IDS + at, *(x[None] for x in to), *more, rows=IDS[None] + KV_AT)
    layers = LayerPages.of(*([x[KV_AT:]] for x in source), "cpu")
    op(layers, IDS, *near, *more, rows=IDS[None])
    equal([x[None, at:] for x in to], near)
