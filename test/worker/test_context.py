"""Lists of context pages: kept tokens of one KV head, with a last page that may be partly filled."""

import numpy as np
import pytest

from sglang_scout.worker.client import WorkerClient, WorkerConfig
from worker_cases import buffers, close

SIZE, CONTEXT = 4, 20


@pytest.fixture
def arena(make_arena):
    made = make_arena(num_kv_heads=1, context_pages=CONTEXT)
    rng = np.random.default_rng(3)
    for layer, which in np.ndindex(made.spec.num_layers, 2):
        plane = made.context(layer, which)
        plane[:] = rng.standard_normal(plane.shape, np.float32)
    return made


def request_and_answer(arena, layer, rng):
    """Query, ids and counts of a batch: lists of host pages, of context pages, of these with a partial last one, none.
    And out and lse in float64."""
    spec = arena.spec
    q = rng.standard_normal((4, spec.num_q_heads, spec.head_dim), np.float32)
    pages, counts = np.full((4, 8), -1, np.int32), rng.integers(1, 9, 4, np.int32)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, kind in enumerate(rng.permutation(["host", "whole", "partial", "none"])):
        if kind == "none":
            counts[row] = 0
            continue
        pools = [arena.k_pages(layer)[:, :, 0], arena.v_pages(layer)[:, :, 0]]
        if kind != "host":
            pools = [arena.context(layer, which) for which in (0, 1)]
        ids = own = rng.choice(len(pools[0]), counts[row], replace=False)
        lengths = np.full(len(own), SIZE)
        if kind == "partial":
            lengths[-1] = rng.integers(1, SIZE)
        if kind != "host":
            ids = spec.num_pages + own * SIZE + lengths - 1
        pages[row, : len(ids)] = ids
        k, v = (
            np.concatenate([x[p, :n] for p, n in zip(own, lengths, strict=True)]) for x in pools
        )
        scores = q[row].astype(float) @ k.T * spec.scale
        lse[row] = np.log(np.exp(scores).sum(1))
        out[row] = np.exp(scores - lse[row][:, None]) @ v
    return (q, pages, counts), (out, lse)


@pytest.mark.parametrize(("starts", "threads"), [(True, 3), (False, 1), (False, 3)])
def test_worker_and_caller_attend_to_the_kept_tokens(arena, cpu, starts, threads):
    rng = np.random.default_rng(5)
    client = WorkerClient(arena, [cpu], config=WorkerConfig(threads_per_group=threads))
    if starts:
        client.start()
    for step in range(8):
        for layer in range(arena.spec.num_layers):
            request, expected = request_and_answer(arena, layer, rng)
            found = buffers(arena, 4)
            reply = client.wait(client.post(layer, step, *request), *found)
            close(found, expected)
            assert (reply.fallback_pages == 0) == starts
    client.stop()


def test_ids_behind_the_last_token_are_refused(arena, cpu):
    client, q = WorkerClient(arena, [cpu]), np.zeros((1, 4, 16), np.float32)
    end = arena.spec.num_pages + CONTEXT * SIZE
    client.post(0, 0, q, np.full((1, 1), end - 1, np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match=f"page id {end} of row 0 is outside"):
        client.post(0, 1, q, np.full((1, 1), end, np.int32), np.ones(1, np.int32))
