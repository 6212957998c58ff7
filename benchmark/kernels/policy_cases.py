"""The kernels of policies as a `Case`, of those policies that there are."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from benchmark.kernels import gpu_cases
from benchmark.kernels.gpu_pools import (
    DTYPE,
    E4M3,
    REPEATS,
    Case,
    D,
    Op,
    Pools,
    S,
    changed,
    difference,
    name_of,
)

HAS_LEARNED, HAS_HGCA = (
    find_spec(f"sglang_scout.policy.{name}") is not None for name in ("learned", "hgca")
)
if HAS_LEARNED:
    from sglang_scout.policy import learned
    from sglang_scout.policy.learned import kernels

    EMBEDDING_SCORES = Op(kernels.score_embeddings, learned.score_embeddings_reference)
    gpu_cases.BUILDS |= {
        "means": Op(kernels.build_layer_means, learned.build_layer_means_reference),
        "pilots": Op(kernels.build_layer_pilots, learned.build_layer_pilots_reference),
    }
if HAS_HGCA:
    from sglang_scout.policy.hgca import kept_tokens
    from sglang_scout.policy.hgca import kernels as hgca

    DECAY_MASS = Op(hgca.decay_mass, kept_tokens.decay_mass_reference)


def check_cases(pools: Pools) -> Iterator[Case]:
    """At small sizes; digests are among those of gpu_cases.py."""
    if HAS_LEARNED:
        yield from (embedding_scores(pools, 2, 40, x) for x in (pools.means, pools.pilots))
    if HAS_HGCA:
        for kv in (DTYPE, E4M3):
            yield from window_weights(pools, 2, 3, kv)


def embedding_scores(pools: Pools, B: int, N: int, embeddings: torch.Tensor) -> Case:
    q, n_full = pools.random(B * pools.H, embeddings.shape[-1]).to(DTYPE), pools.full(N, B)
    tables = [pools.ids(B, N, pages=len(embeddings)) for _ in range(REPEATS)]
    return Case(
        "score_embeddings",
        {"B": B, "N": N, "W": embeddings.shape[2]},
        B * N * (embeddings[0].nbytes + 4 * pools.H + 4),
        [lambda t=t: EMBEDDING_SCORES.kernel(q, embeddings, t, n_full) for t in tables],
        lambda: difference(EMBEDDING_SCORES, q, embeddings, tables[0], n_full),
    )


def window_weights(pools: Pools, B: int, W: int, kv: torch.dtype = DTYPE) -> Iterator[Case]:
    """HGCA's moving averages over a window of W pages."""
    q, lse = pools.random(B, pools.HQ, D).to(DTYPE), pools.random(B, pools.HQ) + 8
    maw = pools.uniform(B, W, pools.H, S)
    ids, slot_of = pools.ids(B, W - 1), pools.ids(pools.pages)
    window = ids, pools.full(W - 1, B), slot_of, pools.ids(B), pools.full(7, B)
    rows = pools.full(0, B), torch.arange(B, dtype=torch.int32, device=pools.device)

    def call(function: Any = DECAY_MASS.kernel) -> object:
        k = pools.kv(kv, function is DECAY_MASS.reference)[0]
        return function(q, lse, k, *window, *rows, rows[0], maw, 0.1, D**-0.5)

    yield Case(
        "decay_mass",
        {"B": B, "W": W, "kv": name_of(kv)},
        B * W * S * pools.H * (D * kv.itemsize + 8),
        [call] * REPEATS,
        lambda: changed(DECAY_MASS, [maw], call),
    )
