"""Bytes read and waits of a step when everything fits, counted, against attention over all of K and V."""

import json

import pytest
import torch

from mini_worker import SIZE

LENGTHS = (9 * SIZE + 3, 2 * SIZE, 5)


def bytes_read(worker, monkeypatch):
    """Of K and V by the device's attention, over those of full attention, and digest pages scored, in one more step."""
    tokens, digests = [], []
    attend, score = worker.engine._attend, worker.digests.score

    def attended(q, k, v, pages, tail_slot, tail_len, *args, slot_of, **kwargs):
        on_device = ((pages >= 0) & (slot_of[pages.long()] >= 0)).sum()
        tokens.append(on_device * SIZE + tail_len.sum())
        return attend(q, k, v, pages, tail_slot, tail_len, *args, slot_of=slot_of, **kwargs)

    def scored(layer, query, candidates, *args):
        digests.append(candidates.n_scored[: len(query)].sum())
        return score(layer, query, candidates, *args)

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "_attend", attended)
        patch.setattr(worker.digests, "score", scored)
        worker.step()
    stock = sum(r.length for r in worker.requests) * worker.shape.num_layers
    return int(sum(tokens)) / stock, sum(digests)


@pytest.mark.parametrize("digest", ["minmax", "rotated-2"])
def test_what_the_budget_covers_reads_what_full_attention_reads(make, monkeypatch, digest):
    """And no digest, though these hold garbage: every page is selected anyway."""
    worker = make(budget_tokens=16 * SIZE, config=json.dumps({"digest": digest}))
    for length in LENGTHS:
        worker.admit(length)
    worker.step()
    full = [p for r in worker.requests for p in r.pages[: r.length // SIZE]]
    kept = [part.clone() for part in worker.digests.parts]
    for part in worker.digests.parts:
        part[:, full] = 255
    waited = worker.engine.transport.waited_ns.clone()
    kv, digests = bytes_read(worker, monkeypatch)
    for part, before in zip(worker.digests.parts, kept, strict=True):
        part.copy_(before)
    assert abs(kv - 1) < 0.01 and digests == 0
    for layer in range(worker.shape.num_layers):
        for row in range(len(LENGTHS)):
            exact = worker.dense(row, layer)
            torch.testing.assert_close(worker.outputs[layer][row], exact, rtol=2e-5, atol=2e-5)
    assert not worker.missing.asked and torch.equal(worker.engine.transport.waited_ns, waited)


@pytest.mark.parametrize("beyond", [3, 4])
def test_a_few_pages_beyond_the_budget_are_attended_to_if_a_prediction_would_read_more(
    make, beyond
):
    worker = make(budget_tokens=4 * SIZE, max_batch=8)
    worker.engine.policy.residency.patience_us = None
    worker.engine.boundary._dense_pages = 3
    worker.admit((4 + beyond) * SIZE + 5)
    for _ in range(20):
        worker.step()
    assert worker.engine.is_dense == (beyond == 3)
    assert (worker.engine.counters.dense_steps > 0) == (beyond == 3)
    if beyond == 3:
        exact = worker.dense(0, 1)
        torch.testing.assert_close(worker.outputs[1][0], exact, rtol=2e-5, atol=2e-5)
