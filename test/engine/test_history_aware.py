"""RheoServe's orchestrator in the engine: recorder, exchange, pins, promotion and reserved slots."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_worker import SIZE, MiniWorker
from ops.plain_residency import PlainResidency
from sglang_scout.policy.history import HistoryAware

FP32_TOLERANCE = 2e-5  # of some thousand checks the largest was 1.1e-5, the median 1.2e-6
LAYERS, PAGES = 2, 90


PILOT = '{"pilot_file": "w.npz"}'


class PlainOrchestrator:
    """The oracle, page by page: replays the boundaries of a ``MiniWorker``, given its steps' selections.

    Args:
        slots, period, pin_share: of each layer; steps between two exchanges; share of the slots.
    """

    def __init__(self, layers, pages, slots, budget, period, pin_share):
        self.table = PlainResidency(layers, pages, slots, half_life_steps=8.0)
        self.table.pin_share = pin_share
        self.budget, self.period = budget, period
        self.coming = []  # (reservation, whether a request has missed it)

    def boundary(self, step, requests, fresh, known):
        """``requests`` have the length of the step; ``fresh``: those of them that join with it."""
        table = self.table
        if known is not None:
            batch = known.launched.batch
            table.touch(table.every, known.pages, known.launched.step, batch.ages == 0)
        for taken, was_missed in self.coming:
            table.commit(taken, step - 1 if was_missed else -1)
        self.coming = []
        table.held_back = sum(self._opened(r) for r in requests)
        self._load_forced(step, requests, fresh)
        spare = [max(len(free) - table.held_back, 0) for free in table.free]
        self._fill(requests, spare)
        if known is not None:
            picked = [self._pick(layer, step, known.missing[layer], spare) for layer in table.every]
            self.coming.append((table.exchange(picked, known.launched.step), True))

    def _opened(self, request):
        """Pages that the request opens before every layer has had its exchange."""
        last = min(request.length + self.period, request.end_tokens)
        return sum(position % SIZE == 0 for position in range(request.length, last))

    def _load_forced(self, step, requests, fresh):
        forced, empty, warm = [], [], []
        for request in requests:
            full, pages = (request.length - 1) // SIZE, request.pages
            forced += [*pages[: min(full, 1)], *pages[max(full - 1, 0) : full], pages[full]]
            if request.length % SIZE == 1:
                empty.append(pages[full])
            if request in fresh:
                warm += pages[max(full - self.budget, 0) : full]
        self.table.touch_all_layers(self._ids(forced), step)
        self._load(empty, step, step)
        self._load(forced, step, step)
        if warm:
            self._load(forced + warm, step, step - 1, is_forced=False)

    def _load(self, pages, step, before_step, is_forced=True):
        table, pages = self.table, self._ids(pages)
        beside = 0 if is_forced else table.held_back
        wanted = [len(table._missing(layer, pages)) + beside for layer in table.every]
        table.evict(wanted, before_step, is_forced)
        table.commit(table.exchange([pages] * len(wanted), None, is_forced), step)

    def _fill(self, requests, spare):
        """If everything fits, pages are prefetched before any miss."""
        full = [page for r in requests for page in r.pages[: (r.length - 1) // SIZE]]
        if len(full) + len(requests) <= self.table.num_slots:
            absent = [self.table._missing(layer, self._ids(full)) for layer in self.table.every]
            first = [self._ids(a[:n]) for a, n in zip(absent, spare, strict=True)]
            self.coming.append((self.table.exchange(first, None, is_forced=True), False))

    def _pick(self, layer, step, missing, spare):
        score, stamp = self.table.frequency[layer], self.table.stamp[layer]
        if (step + layer) % self.period == 0:
            since = step - self.period - 2  # its selection was known at the last exchange
            return self._ids(
                [p for p, s in enumerate(score.tolist()) if s > 0 and stamp[p] > since]
            )
        missed = {int(page) for page in missing.flat if page >= 0}
        return self._ids(sorted(missed, key=lambda page: (-score[page], page))[: spare[layer]])

    @staticmethod
    def _ids(pages):
        return np.array(pages, np.int64)


def worker_of(*, period=16, pin_share=0.25, config=PILOT, **kwargs):
    worker = MiniWorker(
        policy="rheo",
        layers=LAYERS,
        heads=4,
        kv_heads=2,
        pages=PAGES,
        config=config,
        **kwargs,
    )
    residency, table = worker.engine.policy.residency, worker.table
    residency.period, residency.pin_share, table.pin_share = period, pin_share, pin_share
    return worker


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    period=st.sampled_from([1, 2, 3, 5]),
    pin_share=st.sampled_from([0.0, 0.25, 0.8]),
    budget=st.integers(2, 5),
    extra_pages=st.integers(0, 24),
    grain=st.sampled_from(["layer", "head"]),
)
def test_as_the_plain_one_whatever_happens(seed, period, pin_share, budget, extra_pages, grain):
    config = json.dumps({"digest": "minmax", "grain": grain})
    rng = np.random.default_rng(seed)
    worker = worker_of(
        period=period,
        pin_share=pin_share,
        budget_tokens=budget * SIZE,
        max_batch=3,
        seed=seed,
        resident_tokens=(6 + extra_pages) * SIZE,
        drift=float(rng.choice([0.1, 1.0])),
        config=config,
    )
    boundary, table = worker.engine.boundary, worker.table
    plain = PlainOrchestrator(LAYERS, PAGES, table.num_slots, budget, period, pin_share)
    take_in, known = boundary._take_in, []
    boundary._take_in = lambda: known.append(take_in()) or known[-1]
    fresh = []
    for step in range(1, 40):
        if worker.requests and rng.random() < 0.1:
            request = worker.requests[rng.integers(len(worker.requests))]
            worker.finish(request)
            plain.table.invalidate(np.array(request.pages))
            if rng.random() < 0.5:
                worker.free_pages.sort()  # reused at once
        while len(worker.requests) < 3 and rng.random() < 0.5 or not worker.requests:
            length, new = int(rng.integers(1, 18 * SIZE)), int(rng.integers(0, 30))
            fresh.append(worker.admit(length, max_new=new))
        worker.step()
        plain.boundary(step, worker.requests, fresh, known[-1])
        fresh.clear()
        table.check()
        for name in ("slot_of", "page_of", "is_pending", "frequency", "stamp"):
            assert (getattr(table.metadata, name) == getattr(plain.table, name)).all(), name
        assert table.held_back == plain.table.held_back
    assert worker.engine.counters.verify_max_rel_error <= FP32_TOLERANCE
    worker.close()


@pytest.mark.parametrize("max_new", [0, 999])
def test_pages_that_are_opened_push_out_none_if_slots_were_held_back(max_new):
    worker = worker_of(budget_tokens=128, max_batch=3, drift=0.3)
    for length in (300, 311, 322):
        worker.admit(length, max_new=max_new)
    evict, pushed_out = worker.table.evict, []

    def heard(layer, want_free, before_step, is_forced=True):
        gone = evict(layer, want_free, before_step, is_forced)
        pushed_out.append(gone * is_forced)
        return gone

    for step in range(90):
        if step == 16:  # every layer has had an exchange
            worker.table.evict = heard
        worker.step()
    assert (sum(pushed_out) == 0) == (max_new > 0)
    worker.close()


def test_slots_are_held_back_for_what_comes_before_the_next_exchange():
    residency = HistoryAware(page_size=32, step_pages=1, period=16)
    lengths = np.array([16, 17, 31, 32, 32, 32])
    for max_new, expected in (
        ([0] * 6, 0),
        ([999] * 6, 5),  # the token after 16 more opens a page, the 16th does not
        ([999, 15, 1, 1, 0, 2], 2),
    ):
        assert residency.reserve(lengths, np.array(max_new)) == expected
    assert residency.loaded_pages(np.array([0, 3, 9]), 4).tolist() == [0, 3, 4]
