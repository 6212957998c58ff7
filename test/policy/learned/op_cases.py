"""The learned policies' ops in the tables of tests of all ops."""

import torch

from far_pages import COUNT, PLANES_AT, QUERY, TABLE, D, H, pool
from sglang_scout.ops.pages import LayerPages
from sglang_scout.policy.learned import (
    build_layer_means,
    build_layer_pilots,
    kernels,
    score_embeddings,
)

SCORES = {"pilot": score_embeddings, "means": score_embeddings}
BUILDS = dict.fromkeys((build_layer_means, build_layer_pilots))
FAR_READS = {
    kernels.score_embeddings: (
        PLANES_AT,
        lambda: [pool(PLANES_AT, H, 2, D)],
        lambda x, to: (QUERY[:, 0].contiguous(), *x, TABLE + to, COUNT),
    )
}
FAR_BUILDS = {
    kernels.build_layer_means: (PLANES_AT, lambda: [pool(PLANES_AT, H, 2, D)]),
    kernels.build_layer_pilots: (PLANES_AT, lambda: [pool(PLANES_AT, H, 1, 32)]),
}


def built(*of_page):
    """Of two layers with seven pages of two heads of 16."""
    layers = LayerPages.of(*[[torch.rand(7, 32, 2, 16) for _ in range(2)] for _ in "kv"], "cpu")
    return layers, torch.arange(4), torch.rand(2, 7, 2, *of_page)


EVERY = {
    build_layer_means: lambda: (*built(2, 16), torch.stack([torch.arange(4)] * 2)),
    build_layer_pilots: lambda: (*built(1, 24), torch.rand(2, 2, 24, 32)),
    score_embeddings: lambda: (
        torch.rand(6, 24),
        torch.rand(7, 2, 2, 24),
        torch.ones(3, 5, dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
    ),
}
MUTATES = BUILDS
