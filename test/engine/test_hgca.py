"""A window on the device and kept tokens of each head with the worker, against HGCA's algorithms."""

import math
import os
import signal
import time
from concurrent.futures import Future
from threading import Event

import pytest
import torch

from hgca_worker import LANDS_AFTER, SIZE, WINDOW, ArenaWorker, HgcaWorker
from sglang_scout.ops import triton


@pytest.fixture
def make(make):
    return lambda kind=HgcaWorker, **kwargs: make(kind, **kwargs)


@pytest.mark.parametrize(
    "keys",
    [{}, {"hgca_beta": 0.5, "hgca_alpha": 0.3}, {"context_cap_tokens": 40}, {"hgca_beta": 2.0}],
    ids=str,
)
def test_every_step_is_that_of_the_algorithms(make, keys):
    worker = make(**keys)
    for length in (300, 37, 191):
        worker.admit(length)
    for step in range(80):
        if step == 20:
            worker.finish(worker.requests[0])
            worker.admit(223)  # its first page leaves at once, without statistics
        if step == 45:
            worker.finish(worker.requests[1])
        worker.checked_step()
    counters = worker.engine.counters
    assert counters.cpu_pages > 0 and 0 < counters.verify_max_rel_error <= 1e-5
    assert counters.verify_checks == 2 * counters.steps
    raised = sum(oracle.raised for oracle in worker.oracles)
    assert counters.raised_thresholds == raised and (raised > 0) == ("context_cap_tokens" in keys)
    for request in worker.requests:
        kept = worker.engine.older._requests[request.slot].kept.tokens
        assert kept.min() > 0 and kept.max() < request.length - WINDOW


def test_beta_0_is_full_attention(make):
    worker = make(hgca_beta=0.0)
    worker.admit(300)
    worker.admit(70)
    for _ in range(80):
        worker.checked_step()
        for layer in range(2):
            for row in range(2):
                torch.testing.assert_close(
                    worker.outputs[layer][row], worker.dense(row, layer), rtol=1e-5, atol=1e-5
                )


def test_beta_infinity_is_the_window(make):
    worker = make(hgca_beta=math.inf)
    worker.admit(300)
    for _ in range(LANDS_AFTER):
        worker.checked_step()
    worker.engine_missing.asked.clear()
    for _ in range(70):
        worker.checked_step()
        length = worker.requests[0].length
        first = max(0, (length - 1) // SIZE - (WINDOW // SIZE - 1)) * SIZE
        window = list(range(first, length))
        for layer in range(2):
            expected = worker.dense(0, layer, tokens=window)
            torch.testing.assert_close(worker.outputs[layer][0], expected, rtol=1e-5, atol=1e-5)
    assert not worker.engine_missing.asked and worker.engine.older._cache.used_pages == 0


def test_until_an_evaluation_has_ended_attention_is_full(make, monkeypatch):
    """However long it takes, and also over tokens that leave the window meanwhile."""
    worker = make()
    worker.admit(300)
    held = Future()
    monkeypatch.setattr(worker.engine.older._evaluator, "submit", lambda *_: held)
    for _ in range(70):
        worker.step()
        for layer in range(2):
            expected = worker.dense(0, layer)
            torch.testing.assert_close(worker.outputs[layer][0], expected, rtol=1e-5, atol=1e-5)


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
        assert worker.engine.older._cache.used_pages == 0


def test_a_worker_that_dies_in_mid_evaluation_costs_nothing(make, monkeypatch):
    """With a layer's post in flight: the new request's attention stays full until the evaluation has ended."""
    pytest.importorskip("sglang_scout._native")
    worker, begun, goes_on, held_steps = make(ArenaWorker), Event(), Event(), 4
    older, client = worker.engine.older, worker.client
    worker.admit(300)
    worker.admit(150)
    for _ in range(LANDS_AFTER + 1):
        worker.checked_step()
    select, wait = older._evaluator._select, client.wait

    def held(*args):
        begun.set()
        goes_on.wait(60)
        return select(*args)

    monkeypatch.setattr(older._evaluator, "_select", held)
    monkeypatch.setattr(older, "wait", lambda: None)
    for oracle in worker.admit(260).oracles:
        oracle.lands_after += held_steps
    for _ in range(LANDS_AFTER):
        worker.checked_step()
    assert begun.wait(60)
    while not client.ready:  # replaced if it got no CPU for 2 s
        time.sleep(0.05)
    pid = client.snapshot().pid
    os.kill(pid, signal.SIGSTOP)  # so it has an unanswered post

    def killed(*args):
        client.wait = wait
        os.kill(pid, signal.SIGKILL)
        return wait(*args)

    client.wait = killed
    for _ in range(held_steps):
        worker.checked_step()
        for layer in range(2):
            torch.testing.assert_close(
                worker.outputs[layer][2], worker.dense(2, layer), rtol=1e-5, atol=1e-5
            )
    assert client.snapshot().fallback_pages > 0
    monkeypatch.undo()
    goes_on.set()
    older.wait()
    for _ in range(40):
        worker.checked_step()


def test_on_a_device_s_stream(make):
    """The ring's kernels, in Triton's interpreter."""
    pytest.importorskip("sglang_scout._native")
    if not triton.interpreted():
        pytest.skip("needs Triton's interpreter: the arena is not registered")
    from graph_worker import GraphWorker

    class OnStream(ArenaWorker):
        threads = False

        def _worker(self, missing):
            HgcaWorker._worker(self, missing)
            return GraphWorker._worker(self, missing)

        def close(self):
            HgcaWorker.close(self)
            self.attendant.stop()
            self.arena.close()

    worker = make(OnStream)
    worker.admit(300)
    worker.admit(127)
    for _ in range(LANDS_AFTER + 5):
        worker.checked_step()
    assert worker.attendant.pages() > 0


@pytest.mark.parametrize("beta", [1e39, 1e300])
def test_a_beta_that_float32_cannot_hold_is_infinity(make, beta):
    worker = make(hgca_beta=beta)
    worker.admit(300)
    for _ in range(LANDS_AFTER + SIZE):
        worker.checked_step()
    assert worker.engine.older._cache.used_pages == 0


def test_what_nobody_waits_for_is_not_evaluated(make, monkeypatch):
    """The thread has other requests to evaluate."""
    worker, begun, goes_on = make(), [], Event()
    evaluator = worker.engine.older._evaluator
    select = evaluator._select

    def slow(queries, pages, state):
        begun.append(state)
        goes_on.wait(60)
        return select(queries, pages, state)

    monkeypatch.setattr(evaluator, "_select", slow)
    worker.admit(400)
    second = worker.admit(300)
    for _ in range(LANDS_AFTER):
        worker.step()
    worker.finish(second)
    worker.step()
    goes_on.set()
    worker.engine.older.wait()
    evaluator._thread.submit(int).result()
    assert len(begun) == 1
