"""A window on the device and kept tokens of each head with the worker, against HGCA's algorithms."""

import json
import math
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hgca_oracle import Oracle

from mini_worker import SIZE, HereInstead, MiniWorker
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.layers import LayerPages

WINDOW = 96
LANDS_AFTER = 3
"""Steps if no boundary finds its work unfinished: queries requested, evaluation started, lists exchanged."""


class PlainLists(HereInstead):
    """Stands in for the worker, list by list: host pages for one head, or context pages of it."""

    def post(self, layer, step, q, pages, n_pages):
        self.asked.append((layer, pages.copy()))
        return layer, torch.from_numpy(q.copy()), pages.copy(), n_pages.copy()

    def wait(self, ticket, out, lse):
        layer, q, pages, n_pages = ticket
        q, out, lse = (x.reshape(len(pages), -1, *x.shape[2:]) for x in (q, out, lse))
        for row, (ids, count) in enumerate(zip(pages, n_pages, strict=True)):
            parts = [
                self.of_head(layer, int(i), row % self.shape.num_kv_heads) for i in ids[:count]
            ]
            k, v = (
                torch.cat([torch.zeros(0, self.shape.head_dim), *x])
                for x in ([p[i] for p in parts] for i in (0, 1))
            )
            logits = q[row] @ k.T * self.shape.scale
            out[row] = (logits.softmax(1) @ v).numpy() if len(k) else 0
            lse[row] = logits.logsumexp(1).numpy() if len(k) else -np.inf
        return SimpleNamespace(waited_us=1.0, fallback_pages=0)

    def of_head(self, layer, page, head):
        if page < self.host.num_pages:
            return self.host.k[layer][page, :, head], self.host.v[layer][page, :, head]
        page, last = divmod(page - self.host.num_pages, SIZE)
        return [
            half[layer][page, : last + 1] for half in (self.host.context.k, self.host.context.v)
        ]


class HgcaWorker(MiniWorker):
    """With an oracle per request and layer, compared after every step."""

    def __init__(self, *, context_pages=300, **keys):
        self.keys, self.context_pages = keys, context_pages
        super().__init__(
            policy="hgca",
            budget_tokens=WINDOW,
            config=json.dumps(keys),
            pages=100,
            layers=2,
            around_missing=lambda missing: PlainLists(missing.shape, missing.host),
        )
        self.oracles = []

    def _make_host(self, pages):
        host = super()._make_host(pages)
        s = self.shape
        context = [
            [torch.zeros(self.context_pages, SIZE, s.head_dim) for _ in host.k] for _ in "kv"
        ]
        flat = [[x.flatten(0, 1) for x in half] for half in (host.k, host.v)]
        return HostPages(s, *flat, context=LayerPages.of(*context, "cpu"))

    def admit(self, length, **kwargs):
        request = super().admit(length, **kwargs)
        ids = torch.tensor(request.pages)
        request.oracles = [
            Oracle(
                *(half[layer][ids].flatten(0, 1)[:length] for half in (self.host.k, self.host.v)),
                WINDOW,
                self.shape.scale,
                beta=self.keys.get("hgca_beta", 1.0),
                alpha=self.keys.get("hgca_alpha", 0.1),
                cap=self.keys.get("context_cap_tokens"),
                lands_after=LANDS_AFTER,
            )
            for layer in range(self.shape.num_layers)
        ]
        self.oracles += request.oracles
        return request

    def checked_step(self):
        outputs = self.step()
        for row, request in enumerate(self.requests):
            page, offset = divmod(request.length - 1, SIZE)
            for layer, oracle in enumerate(request.oracles):
                new = (
                    half[layer][request.pages[page], offset] for half in (self.host.k, self.host.v)
                )
                expected = oracle.step(self.queries[layer][row], *new)
                assert not oracle.near, "a weight at its threshold: take another seed"
                found = outputs[layer][row].numpy()
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
            self.check_kept(request)
        self.engine.older.wait()

    def check_kept(self, request):
        """The lists hold the oracle's tokens, in their order."""
        state = self.engine.older._requests[request.slot]
        if state.evaluation is not None:
            return
        ids, counts = self.engine.older._cache.worker_ids(state.kept)
        for layer, oracle in enumerate(request.oracles):
            for head, tokens in enumerate(oracle.kept):
                pages = ids[layer, head, : counts[layer, head]]
                parts = [self.engine_missing.of_head(layer, int(i), head)[0] for i in pages]
                expected = oracle.k[tokens, head]
                found = torch.cat(parts) if parts else torch.zeros(0, self.shape.head_dim)
                np.testing.assert_array_equal(found.double().numpy(), expected)

    def _worker(self, missing):
        self.engine_missing = missing
        return missing


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


@pytest.mark.parametrize("beta", [math.inf, 1e39])
def test_beta_infinity_is_the_window(make, beta):
    """Also one that float32 cannot hold."""
    worker = make(hgca_beta=beta)
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
