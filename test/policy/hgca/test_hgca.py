"""A window on the device and kept tokens of each head with the worker, against HGCA's algorithms."""

import dataclasses
from concurrent.futures import Future
from threading import Event

import numpy as np
import pytest
import torch

from hgca_worker import LANDS_AFTER, WINDOW, HgcaWorker
from mini_worker import SIZE
from sglang_scout.engine import RESULT_DELAY_STEPS
from sglang_scout.engine.memory import ServerSize


@pytest.fixture
def make(make):
    return lambda kind=HgcaWorker, **kwargs: make(kind, **kwargs)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"hgca_beta": 0.5, "hgca_alpha": 0.3},
        {"context_cap_tokens": 40},
        {"context_cap_tokens": 32, "hgca_alpha": 0.5},
        {"hgca_beta": 2.0},
        {"hgca_beta": 0.0},
    ],
    ids=str,
)
def test_every_step_is_that_of_the_algorithms(make, keys):
    worker, keeps_all = make(**keys), keys.get("hgca_beta") == 0
    asked = worker._randn(2, 4, 64)
    worker.run(0, 300, 37, 191)
    worker.admit(250, asked=asked)
    for step in range(80):
        if step == 20:
            worker.finish(worker.requests[0])
            worker.admit(223)  # its first page leaves at once, without averages
        if step == 45:
            worker.finish(worker.requests[1])
        worker.checked_step()
        if keeps_all:
            check_last_step(worker)
    counters = worker.engine.parts.counters
    assert counters.cpu_pages > 0 and 0 < counters.verify_max_rel_error <= 1e-5
    assert counters.verify_checks == 2 * counters.steps
    dropped = sum(oracle.dropped for oracle in worker.oracles)
    assert (dropped > 0) == ("context_cap_tokens" in keys)
    for request in worker.requests:
        kept = worker.older_of(request).kept.tokens
        assert kept.min() > 0 and (keeps_all or kept.max() < request.length - WINDOW)
        for layer, oracle in enumerate(request.oracles):
            for head, tokens in enumerate(oracle.kept):
                assert worker.kept_of(request, layer, head) == set(tokens)


def check_last_step(worker, tokens=None):
    """Every row attended to ``tokens``, or its whole context."""
    for layer, outputs in enumerate(worker.outputs):
        for row, out in enumerate(outputs):
            expected = worker.dense(row, layer, tokens)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-5)  # both are fp32


def test_an_infinite_beta_is_the_window(make):
    """Also one that float32 cannot hold."""
    worker = make(hgca_beta=1e39)
    worker.admit(300)
    for _ in range(LANDS_AFTER):
        worker.checked_step()
    worker.engine_missing.asked.clear()
    for _ in range(40):
        worker.checked_step()
        length = worker.requests[0].length
        first = max(0, (length - 1) // SIZE - (WINDOW // SIZE - 1)) * SIZE
        check_last_step(worker, list(range(first, length)))
    assert not worker.engine_missing.asked and worker.engine.selector._cache.used_pages == 0


def test_until_an_evaluation_has_ended_attention_is_full(make, monkeypatch):
    """However long it takes, and also over tokens that leave the window meanwhile."""
    worker = make()
    worker.admit(300)
    held = Future()
    monkeypatch.setattr(worker.engine.selector._thread, "submit", lambda *_: held)
    for _ in range(70):
        worker.step()
        check_last_step(worker)


def test_context_pages_come_back_when_requests_end(make):
    """Also of a request that ends before its evaluation."""
    worker = make()
    for steps in (1, 2, 3, 6):
        request = worker.admit(400)
        other = worker.admit(200)
        for _ in range(steps):
            worker.checked_step()
        worker.finish(request)
        worker.checked_step()
        worker.finish(other)
        worker.admit(40)
        for _ in range(4):
            worker.checked_step()
        worker.finish(worker.requests[0])
        assert worker.engine.selector._cache.used_pages == 0


def test_what_nobody_waits_for_is_not_evaluated(make, monkeypatch):
    """The thread has other requests to evaluate."""
    worker, begun, goes_on = make(), [], Event()
    older = worker.engine.selector
    select = older._select

    def slow(queries, pages):
        begun.append(pages)
        goes_on.wait(60)
        return select(queries, pages)

    monkeypatch.setattr(older, "_select", slow)
    worker.admit(400)
    second = worker.admit(300)
    for _ in range(LANDS_AFTER):
        worker.step()
    worker.finish(second)
    worker.step()
    goes_on.set()
    older._thread.submit(int).result()
    assert len(begun) == 1


def test_pages_of_a_request_that_ended_are_used_again_when_no_step_may_read_them(make):
    cache = make().engine.selector._cache
    cache.begin_step()
    kept, zeros = cache.empty(), np.zeros(40, np.int64)
    cache.add(kept, zeros, zeros, np.arange(40), np.ones(40, np.float32))
    cache.release(kept)
    for _ in range(RESULT_DELAY_STEPS):
        assert cache.used_pages == 2
        cache.begin_step()
    assert cache.used_pages == 0


def test_no_two_pages_leave_at_one_boundary(make):
    """Averages are read back of one."""
    worker = make()
    worker.run(3, 300)
    worker.requests[0].length += 2 * SIZE
    worker.requests[0].pages += worker.free_pages[:2]
    with pytest.raises(AssertionError, match="averages are of one page"):
        worker.step()


@pytest.fixture
def full_pool(make):
    """A pool of 32 pages in a layer, two of them spare, and lists that it has no more pages for."""
    cache = make(context_pages=32).engine.selector._cache
    cache.begin_step()
    return cache, cache.empty()


def add(cache, kept, heads, tokens, salience):
    heads, tokens, salience = np.broadcast_arrays(heads, tokens, np.float32(salience))
    cache.add(kept, np.zeros_like(heads), heads, tokens, salience.astype(np.float32))


def held(cache, kept, head):
    return set(cache._entries(kept, np.array([head]))[2].tolist())


def test_pages_of_a_pool_that_is_short_go_to_all_heads_and_to_their_most_salient_tokens(full_pool):
    cache, kept = full_pool
    tokens = np.arange(1000)
    add(cache, kept, np.repeat([0, 1], 1000), np.tile(tokens, 2), np.tile(1 + tokens % 7, 2))
    assert (kept.tokens[0] == 15 * SIZE).all() and cache.used_pages == 30
    for head in (0, 1):
        assert held(cache, kept, head) > set(tokens[tokens % 7 == 6])


def test_in_a_full_pool_more_salient_tokens_take_the_place_of_others(full_pool):
    cache, kept = full_pool
    others = cache.empty()
    add(cache, kept, 0, np.arange(SIZE), np.arange(1.0, 1 + SIZE))
    add(cache, others, 1, np.arange(29 * SIZE), 1.0)
    before = kept.pages[0, 0, 0]
    add(cache, kept, 0, np.arange(500, 503), [0.5, 2.5, 90.0])
    assert held(cache, kept, 0) == {*range(2, SIZE), 501, 502}
    # Steps that still run read the old page. It has changed for no one, and is used again later.
    assert kept.pages[0, 0, 0] != before and cache.used_pages == 31
    for _ in range(RESULT_DELAY_STEPS):
        assert before not in cache._free[0, : cache._num_free[0]]
        cache.begin_step()
    assert before in cache._free[0, : cache._num_free[0]] and cache.used_pages == 30
    layer = cache._pool.k[0][kept.pages[0, 0, 0]]
    rows = cache._source.k[0].flatten(0, 1)[:, 0]
    tokens = cache._token[0, kept.pages[0, 0, 0]]
    assert torch.equal(layer, rows[torch.from_numpy(tokens)])


def test_without_free_pages_lists_stay_as_they_are(full_pool):
    """There are two, for tokens of three."""
    cache, kept = full_pool
    add(cache, kept, 0, np.arange(30 * SIZE), np.linspace(2.0, 1.0, 30 * SIZE))
    add(cache, kept, 0, np.arange(1000, 1070), 2.5)
    assert sum(token >= 1000 for token in held(cache, kept, 0)) == SIZE + 6
    before = held(cache, kept, 0)
    add(cache, kept, 0, np.arange(2000, 2010), 3.0)
    add(cache, kept, 1, np.arange(10), 3.0)
    assert held(cache, kept, 0) == before and not held(cache, kept, 1)


def test_bytes_of_a_window_s_step_are_those_of_its_buffers(make):
    made = make(HgcaWorker)
    older = made.engine.selector
    held = sum(x.nbytes for x in (older._ids, older._queries, older._maw))
    settings = dataclasses.replace(made.config, context_share=0.3)
    context = 32 * made.engine.parts.sizes.max_pages
    planned = ServerSize(settings, made.policy, made.shape, made.settings.max_batch, context, [1])
    assert planned.step_bytes == held
    assert made.engine._results._both.numel() == 0 and made.engine._inputs.candidates.lists == 1
