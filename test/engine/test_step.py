"""The decode step against plain references, from a request's first step to its end.

A step's selections are known two boundaries later: counters exclude the last two steps.
"""

import json

import pytest
import torch

from mini_worker import SIZE
from sglang_scout.engine import RESULT_DELAY_STEPS
from sglang_scout.engine.step_buffers import Candidates
from sglang_scout.engine.verify import co_attention_reference

FP32_TOLERANCE = 1e-5
"""Relative; two online softmaxes and a merge against one softmax, in fp32."""


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


# A list per KV head, and few of the pages resident; the CPU attends with predicted queries after layer 0.
BY_HEAD = {"budget_tokens": 640, "resident_tokens": 192, "config": '{"grain": "head"}'}


@pytest.mark.parametrize(
    ("settings", "layers"),
    [({"budget_tokens": 512}, 3), (BY_HEAD, 1), (BY_HEAD | {"policy": "infinigen"}, 3)],
    ids=str,
)
def test_a_covering_budget_is_exact_full_attention(make, settings, layers):
    """On both sides of a page boundary, and across it."""
    worker, lengths = make(**settings), (1, 31, 64, 291)
    for length in lengths:
        worker.admit(length)
    for _ in range(8):
        worker.step()
        for layer in range(layers):
            for row in range(len(lengths)):
                close(worker.outputs[layer][row], worker.dense(row, layer))
    assert "resident_tokens" in settings or not worker.missing.asked


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("resident_tokens", [None, SIZE])
def test_a_covered_request_is_exact_while_the_cpu_computes_none_of_its_pages(
    make, requests, resident_tokens
):
    """The smallest cache has room for one such request, the default one for all."""
    worker = make(budget_tokens=512, resident_tokens=resident_tokens)
    worker.run(12, *[480] * requests)
    counters, row = worker.engine.parts.counters, requests - 1
    errors = [(out[row] - worker.dense(row, i)).abs().max() for i, out in enumerate(worker.outputs)]
    if requests == 1 or resident_tokens is None:
        assert counters.cpu_pages == 0 and max(errors) < 2e-5
    else:
        assert counters.cpu_pages > 0 and max(errors) > 1e-3, "a predicted query has attended"


@pytest.mark.parametrize("policy", ["scout", "infinigen"])
@pytest.mark.parametrize("digest", ["minmax", "rotated-2"])
def test_a_selected_page_counts_once_wherever_it_is(make, policy, digest):
    """Resident, fetched in this step or on the CPU: exactly the selection."""
    config = {"precompute": False, "digest": digest}
    worker = make(policy=policy, budget_tokens=128, drift=2.0, config=json.dumps(config))
    worker.admit(1000)
    worker.admit(700)
    for _ in range(12):
        worker.step()
        for row, request in enumerate(worker.requests):
            full = torch.tensor([request.pages[: (request.length - 1) // SIZE]], dtype=torch.int32)
            count = torch.tensor([full.shape[1]], dtype=torch.int32)
            for layer in range(3):
                query, of = worker.queries[layer][row : row + 1], Candidates.of(full, count, 1)
                scores = worker.digests.score(layer, query.contiguous(), of, worker.shape.scale)
                scores[0, [0, -1]] = torch.inf
                kept = [
                    *(SIZE * p + t for p in scores[0].topk(4).indices for t in range(SIZE)),
                    *range(SIZE * full.shape[1], request.length),
                ]
                close(worker.outputs[layer][row], worker.dense(row, layer, tokens=kept))
    counters = worker.engine.parts.counters
    pages = counters.cpu_pages, counters.fetched_pages
    ours, none = pages if policy == "scout" else pages[::-1]
    assert ours > 20 and none == 0 and counters.recalled_pages > 0


def test_shared_prefix_pages_are_resident_once_and_digested_once(make):
    worker = make(budget_tokens=128)
    first = worker.admit(256)
    worker.step()
    computed = worker.digests.computed
    second = worker.admit(1)
    own = second.pages
    second.pages = first.pages[:8] + own
    second.length = 8 * SIZE + 1
    worker.step()
    assert worker.digests.computed == computed, "shared pages already have digests"
    assert worker.engine.parts.counters.verify_max_rel_error <= FP32_TOLERANCE


def test_digests_that_arrived_are_used_and_absent_ones_built(make, monkeypatch):
    worker = make(budget_tokens=128, config='{"digest": "minmax"}')

    def arrive(pages):
        for layer in range(3):
            k = worker.host.k[layer][torch.from_numpy(pages[:6])]
            for part, bound in zip(worker.digests.parts, k.aminmax(dim=1), strict=True):
                part[layer, pages[:6]] = bound.view(torch.uint8)

    request = worker.admit(10 * SIZE + 5, arrive=arrive)
    # A boundary's stream has a step to finish first: no read from it there.
    monkeypatch.setattr(worker.digests, "accept", None)
    worker.step()
    assert worker.digests.received == 6 and worker.digests.computed == 4
    for layer in range(3):
        k = worker.host.k[layer][torch.tensor(request.pages[:10])]
        low = worker.digests.parts[0][layer, request.pages[:10]]
        assert torch.equal(low.view(k.dtype), k.amin(1))


def test_counters(make):
    worker = make(budget_tokens=128)
    worker.admit(640)
    worker.admit(640)
    asked = []
    for _ in range(5):
        worker.missing.asked.clear()
        worker.step()
        asked.append(sum((pages >= 0).sum() for _, pages in worker.missing.asked))
    counters, selected = worker.engine.parts.counters, (5 - RESULT_DELAY_STEPS) * 3 * 2 * 4
    cpu_pages = sum(asked[:-RESULT_DELAY_STEPS])
    assert counters.cpu_pages == counters.cpu_pages_by_layer.sum() == cpu_pages
    assert counters.selected_pages == counters.budget_pages == selected and counters.steps == 5


def test_a_batch_beyond_the_buffers_is_refused(make):
    worker = make(max_batch=1)
    worker.admit(3)
    worker.admit(3)
    with pytest.raises(ValueError, match="batch of 2 rows"):
        worker.step()


@pytest.mark.parametrize("recall", ["fixed", "adaptive"])
def test_the_same_request_gives_the_same_outputs_every_time(make, recall):
    """Copies run in another thread; residency must not depend on its speed."""
    runs = []
    for _ in range(2):
        worker = make(budget_tokens=128, seed=11, config=f'{{"recall": "{recall}"}}')
        # Adaptive recall is deterministic unless a copy is late, which a busy machine may cause.
        worker.engine.parts.policy.residency.patience_us = None
        worker.admit(640)
        runs.append([torch.stack(worker.step()) for _ in range(20)])
        assert worker.engine.parts.counters.recalled_pages > 0
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_missing_pages_weigh_as_the_real_query_says(make):
    """By the digests' estimates: the output is closer to that with the exact masses."""
    worker = make(budget_tokens=320, drift=2.0, config='{"recall": "off"}')
    worker.admit(700)
    shape, host, gaps = worker.shape, worker.host, {False: 0.0, True: 0.0}
    for _ in range(6):
        worker.step()
        batch = worker.engine._results.launched[-1].batch
        for layer in (1, 2):
            chosen, missing = (x[0][x[0] >= 0].long() for x in worker.engine._results.of(layer, 1))
            assert len(missing)
            here = [page for page in chosen.tolist() if page not in missing]
            tail = batch.tail_page[0], slice(int(batch.tail_len[0]))
            device = [
                torch.cat([x[layer][here].flatten(0, 1), x[layer][tail]]) for x in (host.k, host.v)
            ]
            cpu = [x[layer][missing].flatten(0, 1) for x in (host.k, host.v)]
            queries = worker.queries[layer][0].float(), worker.missing.queries[layer][0]
            keys = cpu[0].float().repeat_interleave(queries[0].shape[0] // cpu[0].shape[1], 1)
            logits = [torch.einsum("hd,thd->ht", q, keys) * shape.scale for q in queries]
            real, ahead = (x.logsumexp(-1) for x in logits)
            for exact in gaps:
                change = real - ahead if exact else torch.zeros(1)
                expected = co_attention_reference(*queries, *device, *cpu, shape.scale, change)
                gaps[exact] += float((worker.outputs[layer][0] - expected).abs().mean())
    assert gaps[True] < 0.7 * gaps[False]


@pytest.mark.parametrize("digest", ["minmax", "rotated-2"])
def test_what_the_budget_covers_is_not_scored(make, digest):
    """Every page is selected anyway: digests may hold garbage."""
    worker = make(budget_tokens=16 * SIZE, config=json.dumps({"digest": digest}))
    worker.run(1, *(lengths := (9 * SIZE + 3, 2 * SIZE, 5)))
    full = [p for r in worker.requests for p in r.pages[: r.length // SIZE]]
    kept = [part.clone() for part in worker.digests.parts]
    for part in worker.digests.parts:
        part[:, full] = 255
    waited = worker.engine.transport.waited_ns.clone()
    worker.step()
    for part, before in zip(worker.digests.parts, kept, strict=True):
        part.copy_(before)
    assert not worker.engine._inputs.candidates.n_scored.any()
    for layer in range(worker.shape.num_layers):
        for row in range(len(lengths)):
            close(worker.outputs[layer][row], worker.dense(row, layer))
    assert not worker.missing.asked and torch.equal(worker.engine.transport.waited_ns, waited)


@pytest.mark.parametrize("beyond", [3, 4])
def test_a_few_pages_beyond_the_budget_are_read_if_a_prediction_would_read_more(make, beyond):
    worker = make(budget_tokens=4 * SIZE, max_batch=8)
    worker.engine.parts.policy.residency.patience_us = None
    worker.engine.selector.dense_pages = 3
    worker.run(20, (4 + beyond) * SIZE + 5)
    assert worker.engine.is_dense == (beyond == 3)
    assert (worker.engine.parts.counters.dense_steps > 0) == (beyond == 3)
    if beyond == 3:
        close(worker.outputs[1][0], worker.dense(0, 1))
