"""Lists of context pages: kept tokens of one KV head, with a last page that may be partly filled."""

import numpy as np
import pytest

from sglang_scout.worker.client import WorkerClient, WorkerConfig

SIZE, CONTEXT = 4, 20


@pytest.fixture
def arena(make_arena):
    made = make_arena(num_kv_heads=1, context_pages=CONTEXT)
    rng = np.random.default_rng(3)
    for layer in range(made.spec.num_layers):
        for which in (0, 1):
            plane = made.context(layer, which)
            plane[:] = rng.standard_normal(plane.shape, np.float32)
    return made


def requests(spec, rng):
    """Query, ids and counts of a batch, and the tokens that each row denotes: (page, tokens) of which pool."""
    q = rng.standard_normal((4, spec.num_q_heads, spec.head_dim), np.float32)
    pages, counts, meant = np.full((4, 8), -1, np.int32), np.zeros(4, np.int32), []
    for row, kind in enumerate(rng.permutation(["host", "whole", "partial", "none"])):
        counts[row] = count = 0 if kind == "none" else rng.integers(1, 9)
        own = rng.choice(CONTEXT if kind != "host" else spec.num_pages, count, replace=False)
        lengths = np.full(count, SIZE)
        if kind == "partial":
            lengths[-1] = rng.integers(1, SIZE)
        ids = own if kind == "host" else spec.num_pages + own * SIZE + lengths - 1
        pages[row, :count] = ids
        meant.append((kind == "host", list(zip(own, lengths, strict=True))))
    return q, pages, counts, meant


def expected(arena, layer, q, meant):
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, (is_host, tokens) in enumerate(meant):
        if not tokens:
            continue
        pools = [arena.k_pages(layer)[:, :, 0], arena.v_pages(layer)[:, :, 0]]
        pools = pools if is_host else [arena.context(layer, which) for which in (0, 1)]
        k, v = (
            np.concatenate([pool[page, :n] for page, n in tokens]).astype(float) for pool in pools
        )
        s = q[row] @ k.T * arena.spec.scale
        lse[row] = np.log(np.exp(s).sum(1))
        out[row] = np.exp(s - lse[row][:, None]) @ v
    return out, lse


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("starts", [True, False])
def test_worker_and_caller_attend_to_the_kept_tokens(arena, buffers, cpu, starts, threads):
    rng = np.random.default_rng(5)
    client = WorkerClient(arena, [cpu], config=WorkerConfig(threads_per_group=threads))
    if starts:
        client.start()
    for step in range(8):
        for layer in range(arena.spec.num_layers):
            *request, meant = requests(arena.spec, rng)
            out, lse = buffers(arena, 4)
            reply = client.wait(client.post(layer, step, *request), out, lse)
            of = expected(arena, layer, request[0], meant)
            np.testing.assert_allclose(out, of[0], atol=2e-5, rtol=2e-5)
            np.testing.assert_allclose(lse, of[1], atol=2e-5, rtol=2e-5)
            assert (reply.fallback_pages == 0) == starts
    client.stop()


def test_ids_behind_the_last_token_are_refused(arena, cpu):
    client, q = WorkerClient(arena, [cpu]), np.zeros((1, 4, 16), np.float32)
    end = arena.spec.num_pages + CONTEXT * SIZE
    client.post(0, 0, q, np.full((1, 1), end - 1, np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match=f"page id {end} of row 0 is outside"):
        client.post(0, 1, q, np.full((1, 1), end, np.int32), np.ones(1, np.int32))
