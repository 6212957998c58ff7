"""Digest, grain, query, route and residency in any combination: each step is attention over exactly its pages."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_worker import SIZE, MiniWorker
from sglang_scout.policy import sparda

pytest.importorskip("sglang_scout._native")

BUDGET = 4 * SIZE
KEYS = st.fixed_dictionaries(
    {
        "digest": st.sampled_from(["minmax", "rotated-1", "rotated-2"]),
        "grain": st.sampled_from(["layer", "head"]),
        "precompute": st.booleans(),
        "attend": st.sampled_from(["resident", "selected"]),
        "recall": st.sampled_from(["off", "fixed", "adaptive"]),
        "reweigh": st.booleans(),
        "sink_pages": st.integers(0, 1),
        "recent_pages": st.integers(0, 2),
    },
    optional={"head_reduce": st.just("max")},
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(["scout", "infinigen", "rheo"]),
    keys=KEYS,
    lengths=st.lists(st.integers(1, 14 * SIZE), min_size=1, max_size=3),
    resident=st.sampled_from([4 * SIZE, 8 * SIZE, 40 * SIZE]),
    seed=st.integers(0, 99),
)
def test_any_axes_attend_to_exactly_their_pages(policy, keys, lengths, resident, seed):
    worker = MiniWorker(
        policy=policy, budget_tokens=BUDGET, resident_tokens=resident, config=json.dumps(keys), seed=seed,
    )  # fmt: skip
    for length in lengths:
        worker.admit(length)
    for _ in range(5):
        worker.step()
        worker.table.check()
    counters = worker.engine.counters
    assert counters.verify_checks == 5 * worker.shape.num_layers
    assert counters.verify_max_rel_error < 2e-5
    if policy == "infinigen":
        assert counters.cpu_pages == 0 and not worker.missing.asked
    worker.close()


@pytest.mark.parametrize("policy", ["scout", "infinigen"])
@pytest.mark.parametrize("attend", ["resident", "selected"])
def test_heads_with_a_covering_budget_are_exact_full_attention(policy, attend):
    keys = {"grain": "head", "attend": attend}
    worker = MiniWorker(
        policy=policy, budget_tokens=20 * SIZE, resident_tokens=6 * SIZE, config=json.dumps(keys)
    )
    for length in (9 * SIZE + 3, 2 * SIZE, 5):
        worker.admit(length)
    for _ in range(4):
        for layer, out in enumerate(worker.step()):
            if layer and policy == "scout":
                continue  # the CPU attends with predicted queries
            for row in range(3):
                expected = worker.dense(row, layer)
                assert (out[row] - expected).abs().max() < 1e-5 * expected.abs().max()
    worker.close()


def test_heads_choose_for_themselves():
    worker = MiniWorker(
        budget_tokens=BUDGET, config='{"grain": "head", "recall": "off"}', drift=0.0
    )
    worker.admit(14 * SIZE)
    for _ in range(3):
        worker.step()
    differ = False
    for _, pages in worker.missing.asked:
        first, second = (set(row[row >= 0]) for row in pages)
        differ |= first != second
    assert differ
    worker.close()


@pytest.mark.parametrize("route", ["fetch", "cpu"])
def test_a_forecast_chooses_and_the_real_query_attends(route, monkeypatch):
    """What a source that cannot attend leaves to the CPU is posted late, with the real query."""
    make = sparda.make
    monkeypatch.setattr(sparda, "make", lambda c: dataclasses.replace(make(c), route=route))
    worker = MiniWorker(
        policy="sparda",
        budget_tokens=BUDGET,
        resident_tokens=6 * SIZE,
        config='{"forecast_file": "w.npz"}',
    )
    covered = MiniWorker(
        policy="sparda", budget_tokens=20 * SIZE, config='{"forecast_file": "w.npz"}'
    )
    for each in (worker, covered):
        each.admit(14 * SIZE)
        each.admit(3 * SIZE + 1)
    for _ in range(4):
        worker.step()
        worker.table.check()
        for layer, out in enumerate(covered.step()):
            for row in range(2):
                expected = covered.dense(row, layer)
                assert (out[row] - expected).abs().max() < 1e-5 * expected.abs().max()
    counters = worker.engine.counters
    assert counters.verify_max_rel_error < 2e-5
    assert counters.selected_pages > counters.cpu_pages + counters.fetched_pages > 0
    assert (counters.cpu_pages > 0) == (route == "cpu")
    worker.close()
    covered.close()
