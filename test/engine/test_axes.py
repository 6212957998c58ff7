"""Digest, grain, query, route, residency and dtype in any combination: each step attends to exactly its pages."""

import dataclasses
import json
from itertools import product
from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mini_worker
from mini_worker import SIZE, MiniWorker, check_table
from page_weights import digest_kinds, identity, rule_of
from sglang_scout.engine.digests import KINDS
from sglang_scout.engine.policy import QuerySource
from sglang_scout.policy import make_policy, policies

BUDGET = 4 * SIZE
QUERIES = {
    "real": QuerySource(is_ahead=False),
    "next layer": QuerySource(),
    "next layer but one exact": QuerySource(exact=(1,)),
    "forecast": QuerySource(attends=False),
}
# Digest, grain and query. Embeddings are per KV head: one is trained for a forecast, one for queries.
EMBEDDINGS = product([kind for kind in digest_kinds() if kind not in KINDS], ["head"], QUERIES)
CHOOSERS = [
    *product([kind for kind in KINDS if kind != "none"], ["layer"], QUERIES),
    *product([kind for kind in KINDS if kind != "none"], ["head"], QUERIES),
    *(x for x in EMBEDDINGS if (x[0] == "mean16") == (x[2] == "forecast")),
]
DTYPES = {}, {"dtype": torch.bfloat16}, {"fp8": torch.float8_e4m3fn}, {"fp8": torch.float8_e5m2}
KEYS = st.fixed_dictionaries(
    {
        "recall": st.sampled_from(["off", "fixed", "adaptive"]),
        "reweigh": st.booleans(),
        "sink_pages": st.integers(0, 1),
        "recent_pages": st.integers(0, 2),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    residency_of=st.sampled_from([p for p in ("scout", "infinigen", "rheo") if p in policies()]),
    route=st.sampled_from(["cpu", "fetch"]),
    chooser=st.sampled_from(CHOOSERS),
    of=st.sampled_from(DTYPES),
    only_selected=st.booleans(),
    keys=KEYS,
    lengths=st.lists(st.integers(1, 14 * SIZE), min_size=1, max_size=3),
    resident=st.sampled_from([8 * SIZE, 40 * SIZE]),
    seed=st.integers(0, 99),
)
def test_any_axes_attend_to_exactly_their_pages(
    residency_of, route, chooser, of, only_selected, keys, lengths, resident, seed
):
    digest, grain, query = chooser
    keys = keys | {"grain": grain, "digest": "minmax"}  # embeddings have no key

    def made(context):
        policy = make_policy(context)
        kind = rule_of(digest, identity(3, dim=64))
        choices = {"digest": kind.digest, "weights": kind.weights, "only_selected": only_selected}
        rule = dataclasses.replace(policy.rule, **choices)
        return dataclasses.replace(policy, rule=rule, query=QUERIES[query], route=route)

    with mock.patch.object(mini_worker, "make_policy", made):
        worker = MiniWorker(
            policy=residency_of,
            budget_tokens=BUDGET,
            resident_tokens=resident,
            config=json.dumps(keys),
            seed=seed,
            **of,
        )
    worker.run(5, *lengths)
    check_table(worker.table)
    counters = worker.engine.parts.counters
    assert counters.verify_checks == 5 * worker.shape.num_layers
    assert counters.verify_max_rel_error < (1e-2 if "dtype" in of else 2e-5)
    if route != "cpu":
        assert counters.cpu_pages == 0 and not worker.missing.asked
    worker.close()
