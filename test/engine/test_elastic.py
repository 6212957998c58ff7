"""Recall and residency under adaptive recall: late copies, free slots, and requests that come and go."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_worker import SIZE, MiniWorker, check_table
from stand_ins import with_slow_link

FP32_TOLERANCE = 1e-5


def test_a_late_copy_does_not_hold_the_step_and_its_pages_stay_with_the_cpu(make):
    worker = make(budget_tokens=256, max_batch=2, pages=120)
    link = with_slow_link(worker)
    worker.run(6, 100 * SIZE)
    recall = worker.engine.recall
    assert link.forced == 0 and recall.late_pages > 0
    assert worker.engine.parts.counters.recalled_pages == 0
    taken = [copies.taken for copies in recall._in_flight]
    under_way = {at for t in taken for at in zip(t.layers.tolist(), t.pages.tolist(), strict=True)}
    worker.missing.asked.clear()
    worker.step()
    again = {(layer, int(p)) for layer, pages in worker.missing.asked for p in pages[pages >= 0]}
    assert under_way & again, "what has not landed is still computed on the CPU"
    assert worker.engine.parts.policy.residency.backoffs == 1
    link.run(999)
    worker.step()
    assert worker.engine.parts.counters.recalled_pages == len(under_way)
    assert worker.engine.parts.counters.verify_max_rel_error <= FP32_TOLERANCE


def test_a_request_that_fits_is_resident_whole_and_exact_once_the_others_have_left(make):
    worker = make(budget_tokens=128, max_batch=4, pages=160)
    policy = worker.engine.parts.policy
    worker.engine.selector._rule = dataclasses.replace(policy.rule, only_selected=False)
    policy.residency.patience_us = None
    first = worker.admit(19 * SIZE + 5)  # more than its budget of 4 pages, less than the 24 slots
    others = [worker.admit(30 * SIZE) for _ in range(3)]
    worker.run(10)
    assert (worker.table.slot_of[:, first.pages] < 0).any()
    for other in others:
        worker.finish(other)
    worker.run(3)
    worker.missing.asked.clear()
    for _ in range(10):
        worker.step()
        for layer in range(3):
            exact = worker.dense(0, layer)
            torch.testing.assert_close(worker.outputs[layer][0], exact, rtol=2e-5, atol=2e-5)
    assert not worker.missing.asked, "the worker idles"


@pytest.mark.rheo
@pytest.mark.parametrize("max_new", [0, 999])
def test_pages_that_are_opened_push_out_none_if_slots_were_held_back(make, max_new):
    rheo = {"policy": "rheo", "config": '{"pilot_file": "w.npz"}'}
    worker = make(budget_tokens=128, max_batch=3, layers=2, pages=90, drift=0.3, **rheo)
    for length in (300, 311, 322):
        worker.admit(length, max_new=max_new)
    assert worker.table.pin_share == worker.engine.parts.policy.residency.pin_share > 0
    evict, pushed_out = worker.table.evict, []

    def heard(layer, want_free, before_step, is_forced=True):
        gone = evict(layer, want_free, before_step, is_forced)
        pushed_out.append(gone * is_forced)
        return gone

    for step in range(60):
        if step == 16:  # every layer has had an exchange
            worker.table.evict = heard
        worker.step()
    assert (sum(pushed_out) == 0) == (max_new > 0)


class ElasticMachine(RuleBasedStateMachine):
    """Requests join and leave while copies land in time, late, or after their request has ended.

    The invariant is checked by the engine at every layer (verify): outputs are those of the selected pages, each
    counted once, with the bytes of their current owner.
    """

    @initialize(
        seed=st.integers(0, 99),
        budget_pages=st.integers(2, 6),
        extra_pages=st.integers(0, 12),
        step_mib=st.sampled_from([0.02, 0.3, 64.0]),
        recall=st.sampled_from(["adaptive", "adaptive", "fixed"]),
    )
    def start(self, seed, budget_pages, extra_pages, step_mib, recall):
        keys = {"recall": recall, "recall_interval": 2, "recall_step_mib": step_mib}
        sizes = {"layers": 2, "heads": 2, "kv_heads": 1, "max_batch": 3, "pages": 90}
        self.worker = MiniWorker(
            seed=seed,
            drift=0.7,
            budget_tokens=budget_pages * SIZE,
            resident_tokens=(6 + extra_pages) * SIZE,
            config=json.dumps(keys),
            **sizes,
        )
        self.link = with_slow_link(self.worker)
        self.coming = []

    @precondition(lambda self: len(self.worker.requests) + len(self.coming) < 3)
    @rule(
        pages=st.integers(0, 18),
        tokens=st.integers(1, SIZE),
        hint=st.randoms(),
        joins=st.booleans(),
    )
    def arrive(self, pages, tokens, hint, joins):
        """With any hint: even a wrong one controls only what is copied first."""
        worker = self.worker
        if pages + 4 >= len(worker.free_pages):
            return
        taken = {r.slot for r in (*worker.requests, *self.coming)}
        request = worker.bring(pages * SIZE + tokens, next(i for i in range(3) if i not in taken))
        full = np.array(request.pages[: request.length // SIZE], np.int64)
        places = [hint.sample(range(len(full)), min(6, len(full))) for _ in range(2)]
        sent = np.array(places, np.int64) if hint.random() < 0.7 else None
        worker.engine.requests.arrive(request.slot, full, sent)
        self.coming.append(request)
        if joins:
            self.join()

    @precondition(lambda self: self.coming)
    @rule()
    def join(self):
        self.worker.join(self.coming.pop(0))

    @precondition(lambda self: self.coming)
    @rule(reuse_first=st.booleans())
    def abort(self, reuse_first):
        """Before it joins, perhaps with its copies in flight."""
        self.worker.finish(self.coming.pop())
        if reuse_first:
            self.worker.free_pages.sort()

    @precondition(lambda self: self.worker.requests)
    @rule(which=st.integers(0, 2), reuse_first=st.booleans())
    def leave(self, which, reuse_first):
        """Its copies may be in flight, and its pages may be reused at once."""
        worker = self.worker
        worker.finish(worker.requests[which % len(worker.requests)])
        if reuse_first:
            worker.free_pages.sort()

    @precondition(lambda self: not self.worker.requests and not self.coming)
    @rule()
    def flush(self):
        self.worker.engine.pages.clear()
        assert self.worker.table.resident_pages == 0
        assert not self.worker.digests.valid.any()

    @precondition(lambda self: self.worker.requests)
    @rule(steps=st.integers(1, 3), copies=st.sampled_from([0, 1, 2, 99]), room=st.integers(0, 2))
    def decode(self, steps, copies, room):
        for _ in range(steps):
            if len(self.worker.free_pages) >= 3:
                names = [request.slot for request in self.coming]
                self.worker.engine.requests.queue(names, room)
                self.worker.step()
                self.link.run(copies)

    @invariant()
    def outputs_were_right_and_slots_are_of_requests(self):
        engine, table = self.worker.engine, self.worker.table
        assert engine.parts.counters.verify_max_rel_error <= FP32_TOLERANCE
        check_table(table)
        owned = {page for r in (*self.worker.requests, *self.coming) for page in r.pages}
        for layer in range(2):
            assert set(np.flatnonzero(table.slot_of[layer] >= 0)) <= owned

    def teardown(self):
        for request in [*self.worker.requests, *self.coming]:
            self.worker.finish(request)
        self.worker.engine.recall.commit(10**6)
        assert self.worker.table.resident_pages == 0
        self.worker.close()


TestElasticMachine = ElasticMachine.TestCase
TestElasticMachine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
