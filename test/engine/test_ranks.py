"""Tensor parallelism: engines with a shard of the heads each, against one with all heads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mini_worker import MiniWorker
from sglang_scout.engine.verify import Verifier
from stand_ins import with_slow_link

TOLERANCE = 2e-5
STEPS = 18


class Meeting:
    """Collectives of ranks that run in threads of this process; ``rank(i)`` is passed to an engine.

    They take turns, as Triton's interpreter cannot run concurrently.
    """

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=60)
        self.given = [None] * size
        self.calls = [[] for _ in range(size)]
        self.turn = threading.Lock()

    def combine(self, rank, x, how):
        self.calls[rank].append((how, x.dtype, tuple(x.shape)))
        self.given[rank] = x.clone()
        self._wait_for_all()
        stacked = torch.stack(self.given)
        self._wait_for_all()
        return stacked.sum(0) if how == "sum" else stacked.amax(0)

    def _wait_for_all(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def rank(self, rank):
        return SimpleNamespace(combine=partial(self.combine, rank))


def selections(worker):
    """Those of a worker, in order."""
    found, touch = [], worker.table.uses.touch

    def remember(layers, pages, step, fresh):  # of one layer, or of all in a step
        found.extend(zip(layers.tolist(), pages.tolist(), strict=True))
        return touch(layers, pages, step, fresh)

    worker.table.uses.touch = remember
    return found


def serve(worker, before_step=lambda step: None, steps=STEPS):
    """Requests come and go. Returns every step's outputs, ``[L][B, HQ, D]``."""
    worker.admit(400)
    second = worker.admit(37)
    outputs = []
    for step in range(steps):
        if step == 6:
            worker.admit(700)
        if step == 12:
            worker.finish(second)
        before_step(step)
        outputs.append([out.clone() for out in worker.step()])
    return outputs


@pytest.fixture
def run():
    """``run(size, ...)``: all ranks' outputs, workers and selections."""
    made = []

    def run(size, before_step=lambda worker, step: None, steps=STEPS, **kwargs):
        meeting = Meeting(size)
        workers = [
            MiniWorker(rank=i, of_ranks=size, ranks=meeting.rank(i), **kwargs) for i in range(size)
        ]
        made.extend(workers)
        selected = [selections(worker) for worker in workers]

        def one_rank(worker):
            with meeting.turn:
                return serve(worker, lambda step: before_step(worker, step), steps)

        with ThreadPoolExecutor(size) as threads:
            running = [threads.submit(one_rank, worker) for worker in workers]
            outputs = [one.result() for one in running]
        return outputs, workers, selected, meeting

    yield run
    for worker in made:
        worker.close()


def test_ranks_choose_and_attend_as_one_engine_with_all_heads(run):
    config = '{"recall": "fixed"}'
    settings = {"budget_tokens": 160, "kv_heads": 4, "heads": 8, "config": config}
    one = MiniWorker(**settings)
    expected_pages = selections(one)
    expected = serve(one)
    one.close()
    outputs, workers, selected, meeting = run(2, **settings)
    assert selected[0] == selected[1] == expected_pages
    for step, layers in enumerate(expected):
        for layer, wanted in enumerate(layers):
            joined = torch.cat([outputs[rank][step][layer] for rank in range(2)], dim=1)
            torch.testing.assert_close(joined, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    for worker in workers:
        counters = worker.engine.parts.counters
        assert counters.verify_unequal_selections == 0
        assert counters.verify_max_rel_error <= 1e-5
        assert counters.cpu_pages == one.engine.parts.counters.cpu_pages > 0
    scored = [call for call in meeting.calls[0] if call[1] == torch.float32]
    assert len(scored) == 3 * STEPS, "one call a layer and step"
    assert {call[0] for call in scored} == {"sum"}


def test_a_rank_whose_copies_are_late_chooses_the_same_pages(run):
    links = []

    def before_step(worker, step):
        if worker.settings.rank == 1:
            if step == 0:
                links.append(with_slow_link(worker))
            if step % 7 == 6:
                links[0].run(2)

    _, workers, selected, _ = run(2, before_step, budget_tokens=160, kv_heads=4, heads=8)
    assert selected[0] == selected[1]
    resident = [worker.table.slot_of >= 0 for worker in workers]
    assert (resident[0] != resident[1]).any(), "the ranks must have come to differ"
    for worker in workers:
        assert worker.engine.parts.counters.verify_unequal_selections == 0
        assert worker.engine.parts.counters.verify_max_rel_error <= 1e-5


def test_the_check_sees_selections_that_differ(make):
    said, pages, parts = [], torch.arange(8), make().engine.parts
    parts.ranks = SimpleNamespace(combine=lambda x, _: said.append(x) or torch.stack(said).amax(0))
    for chosen, unequal in ((pages, 0), (pages.clone(), 0), (pages.flip(0), 1)):
        Verifier(parts).check_selection(chosen)
        assert parts.counters.verify_unequal_selections == unequal


@pytest.mark.rheo
def test_heads_choose_for_themselves_where_a_rank_has_one(run):
    policy = {"policy": "rheo", "config": '{"digest": "minmax"}'}
    settings = {"heads": 8, "budget_tokens": 160, **policy}
    one = MiniWorker(**settings)
    of_both = selections(one)
    serve(one, steps=6)
    one.close()
    _, _, selected, meeting = run(2, steps=6, **settings)
    assert not any(meeting.calls)
    for (_, both), *each in zip(of_both, *selected, strict=True):
        for row, pages in enumerate(both):
            assert pages == each[0][1][row] + each[1][1][row]
