"""Digests that are embeddings: a pool builds and scores them for each KV head."""

import numpy as np
import pytest
import torch

from page_weights import identity, pilot_weights, rule_of
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.step_buffers import Candidates
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.policy.learned import half_means, pooled, score_embeddings_reference

L, H, D, SIZE = 3, 2, 16, 32
SHAPE = ModelShape(L, 4, H, D, SIZE, torch.float32, D**-0.5)
WEIGHTS = pilot_weights(identity(L, 4, H, D), rank=8)


@pytest.mark.parametrize("kind", ["mean16", "pilot"])
def test_a_pool_scores_each_head_by_its_keys(kind):
    k = [torch.randn(9, SIZE, H, D) for _ in range(L)]
    pool = DigestPool(SHAPE, 9, "cpu", rule_of(kind, weights=WEIGHTS))
    host = HostPages(SHAPE, *([x.flatten(0, 1) for x in k] for _ in "kv"))
    pages = np.arange(1, 9)
    pool.build(pages[pages != 3], host)
    pool.build_from_slots(pages[2:3], host.for_copies(pool.device), np.full((L, 1), 3))
    table = torch.tensor([[1, 2, 3, 4], [8, 7, 0, 0]], dtype=torch.int32)
    n_full = torch.tensor([4, 2], dtype=torch.int32)
    for layer in range(L):
        if kind == "mean16":
            query = vectors = torch.randn(2, H, D)
            embeddings = half_means(k[layer])
        else:
            query = torch.randn(2, 4, D)
            w_k, w_q = (torch.tensor(WEIGHTS.arrays[name][layer]) for name in ("w_k", "w_q"))
            vectors = torch.einsum("hrx,bhx->bhr", w_q, query.view(2, H, -1))
            embeddings = torch.einsum("hrx,nhx->nhr", w_k, pooled(k[layer]))[:, :, None]
        expected = score_embeddings_reference(vectors.flatten(0, 1), embeddings, table, n_full)
        got = pool.score(layer, query, Candidates.of(table, n_full, 2), SHAPE.scale)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
