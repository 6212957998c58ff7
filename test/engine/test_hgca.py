"""A window on the device and kept tokens of each head with the worker, against HGCA word for word."""

import json
import math
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hgca_oracle import Oracle

from mini_worker import SIZE, HereInstead, MiniWorker
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.layers import LayerPages

WINDOW = 96
LANDS_AFTER = 3
"""Steps, where each boundary finds what it can: queries sent for, evaluation begun, lists exchanged."""


class PlainLists(HereInstead):
    """Answers for the worker, list by list: host pages for one head, or context pages of it."""

    def post(self, layer, step, q, pages, n_pages):
        self.asked.append((layer, pages.copy(), n_pages.copy()))
        return layer, torch.from_numpy(q.copy()), pages.copy(), n_pages.copy()

    def wait(self, ticket, out, lse):
        layer, q, pages, n_pages = ticket
        for row, (ids, count) in enumerate(zip(pages, n_pages, strict=True)):
            parts = [
                self.of_head(layer, int(i), row % self.shape.num_kv_heads) for i in ids[:count]
            ]
            k, v = (torch.cat([torch.zeros(0, self.shape.head_dim), *x]) for x in
                    ([p[i] for p in parts] for i in (0, 1)))  # fmt: skip
            logits = q[row] @ k.T * self.shape.scale
            out[row] = (logits.softmax(1) @ v).numpy() if len(k) else 0
            lse[row] = logits.logsumexp(1).numpy() if len(k) else -np.inf
        return super_reply()

    def of_head(self, layer, page, head):
        if page < self.host.num_pages:
            return self.host.k[layer][page, :, head], self.host.v[layer][page, :, head]
        page, last = divmod(page - self.host.num_pages, SIZE)
        return [
            half[layer][page, : last + 1] for half in (self.host.context.k, self.host.context.v)
        ]


def super_reply():
    from types import SimpleNamespace

    return SimpleNamespace(waited_us=1.0, fallback_pages=0)


class HgcaWorker(MiniWorker):
    """With an oracle for each request and layer, and a look at both after every step."""

    def __init__(self, *, context_pages=300, **keys):
        self.keys, self.context_pages = keys, context_pages
        super().__init__(
            policy="hgca", budget_tokens=WINDOW, config=json.dumps(keys), verify=False, pages=100,
            around_missing=lambda missing: PlainLists(missing.shape, missing.host),
        )  # fmt: skip
        self.oracles = {}

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
        self.oracles[id(request)] = [
            Oracle(
                *(half[layer][ids].flatten(0, 1)[:length] for half in (self.host.k, self.host.v)),
                WINDOW, self.shape.scale, beta=self.keys.get("hgca_beta", 1.0),
                alpha=self.keys.get("hgca_alpha", 0.1), cap=self.keys.get("context_cap_tokens"),
                lands_after=LANDS_AFTER,
            )
            for layer in range(self.shape.num_layers)
        ]  # fmt: skip
        return request

    def checked_step(self, waits=True):
        outputs = self.step()
        for row, request in enumerate(self.requests):
            page, offset = divmod(request.length - 1, SIZE)
            for layer, oracle in enumerate(self.oracles[id(request)]):
                new = (
                    half[layer][request.pages[page], offset] for half in (self.host.k, self.host.v)
                )
                expected = oracle.step(self.queries[layer][row], *new)
                assert not oracle.near, "a weight at its threshold: take another seed"
                found = outputs[layer][row].numpy()
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
            self.check_kept(request)
        if waits:
            self.engine.older.wait()

    def check_kept(self, request):
        """The lists hold the oracle's tokens, in their order."""
        state = self.engine.older._requests[request.slot]
        if state.evaluation is not None:
            return
        ids, counts = self.engine.older._cache.worker_ids(state.kept)
        for layer, oracle in enumerate(self.oracles[id(request)]):
            for head, tokens in enumerate(oracle.kept):
                pages = ids[layer, head, : counts[layer, head]]
                parts = [self.engine_missing.of_head(layer, int(i), head)[0] for i in pages]
                expected = oracle.k[tokens, head]
                found = torch.cat(parts) if parts else torch.zeros(0, self.shape.head_dim)
                np.testing.assert_array_equal(found.double().numpy(), expected)

    def _worker(self, missing):
        self.engine_missing = missing
        return missing

    def full_attention(self, row, layer):
        return self.dense(row, layer)


@pytest.fixture
def make(make):
    return lambda **kwargs: make(HgcaWorker, **kwargs)


@pytest.mark.parametrize(
    "keys",
    [{}, {"hgca_beta": 0.5, "hgca_alpha": 0.3}, {"context_cap_tokens": 40}, {"hgca_beta": 2.0}],
    ids=str,
)
def test_every_step_is_that_of_the_algorithms(make, keys):
    worker = make(**keys)
    for length in (300, 37, 191):
        worker.admit(length)
    for step in range(110):
        if step == 20:
            worker.finish(worker.requests[0])
            worker.admit(223)  # its first page leaves at once, and nothing is known of it
        if step == 50:
            worker.finish(worker.requests[1])
        worker.checked_step()
    counters = worker.engine.counters
    assert counters.cpu_pages > 0
    raised = sum(o.raised for oracles in worker.oracles.values() for o in oracles)
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
        for layer in range(3):
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
        for layer in range(3):
            expected = worker.dense(0, layer, tokens=window)
            torch.testing.assert_close(worker.outputs[layer][0], expected, rtol=1e-5, atol=1e-5)
    assert not worker.engine_missing.asked and worker.engine.older._cache.used_pages == 0


def test_until_an_evaluation_has_ended_attention_is_full(make, monkeypatch):
    """However long it takes, and also of what leaves the window meanwhile."""
    worker = make()
    worker.admit(300)
    held = Future()
    monkeypatch.setattr(worker.engine.older._evaluator, "submit", lambda *_: held)
    for _ in range(70):
        worker.step()
        for layer in range(3):
            expected = worker.dense(0, layer)
            torch.testing.assert_close(worker.outputs[layer][0], expected, rtol=1e-5, atol=1e-5)


def test_context_pages_come_back_when_requests_end(make):
    worker = make()
    for _ in range(3):
        request = worker.admit(400)
        other = worker.admit(200)
        for _ in range(6):
            worker.checked_step()
        worker.finish(request)
        worker.checked_step()
        worker.finish(other)
        worker.admit(40)
        for _ in range(3):
            worker.checked_step()
        worker.finish(worker.requests[0])
    assert worker.engine.older._cache.used_pages == 0
