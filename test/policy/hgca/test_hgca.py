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
        {"hgca_beta": 2.0},
        {"hgca_beta": 0.0},
    ],
    ids=str,
)
def test_every_step_is_that_of_the_algorithms(make, keys):
    worker, keeps_all = make(**keys), keys.get("hgca_beta") == 0
    worker.run(0, 300, 37, 191)
    for step in range(80):
        if step == 20:
            worker.finish(worker.requests[0])
            worker.admit(223)  # its first page leaves at once, without statistics
        if step == 45:
            worker.finish(worker.requests[1])
        worker.checked_step()
        if keeps_all:
            check_last_step(worker)
    counters = worker.engine.parts.counters
    assert counters.cpu_pages > 0 and 0 < counters.verify_max_rel_error <= 1e-5
    assert counters.verify_checks == 2 * counters.steps
    raised = sum(oracle.raised for oracle in worker.oracles)
    assert counters.raised_thresholds == raised and (raised > 0) == ("context_cap_tokens" in keys)
    for request in worker.requests:
        kept = worker.older_of(request).kept.tokens
        assert kept.min() > 0 and (keeps_all or kept.max() < request.length - WINDOW)


def check_last_step(worker, tokens=None):
    """Every row attended to ``tokens``, or its whole context."""
    for layer, outputs in enumerate(worker.outputs):
        for row, out in enumerate(outputs):
            expected = worker.dense(row, layer, tokens)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


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

    def slow(queries, pages, state):
        begun.append(state)
        goes_on.wait(60)
        return select(queries, pages, state)

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
    cache.add(kept, zeros, zeros, np.arange(40))
    cache.release(kept)
    for _ in range(RESULT_DELAY_STEPS):
        assert cache.used_pages == 2
        cache.begin_step()
    assert cache.used_pages == 0


def test_bytes_of_a_window_s_step_are_those_of_its_buffers(make):
    made = make(HgcaWorker)
    older = made.engine.selector
    held = sum(x.nbytes for x in (older._ids, older._queries, older._maw))
    settings = dataclasses.replace(made.config, context_share=0.3)
    context = 32 * made.engine.parts.sizes.max_pages
    planned = ServerSize(settings, made.policy, made.shape, made.settings.max_batch, context, [1])
    assert planned.step_bytes == held
    assert made.engine._results._both.numel() == 0 and made.engine._inputs.candidates.lists == 1
