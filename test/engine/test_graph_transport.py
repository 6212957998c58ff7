"""The graph transport: the guarantees of the host transport, without the host within a step."""

from functools import partial

import numpy as np
import pytest
import torch

from graph_worker import GraphWorker
from mini_worker import SIZE
from op_calls import replaced

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def make(make):
    return partial(make, GraphWorker)


def test_worker_threads_answer_until_they_die_and_the_attendant_after(make):
    worker = make(budget_tokens=128, threads=True, config='{"recall": "off"}')
    worker.run(4, 500, 700)
    assert worker.attendant.pages() == 0
    worker.end_threads()
    worker.run(4)
    assert worker.attendant.pages() > 0
    assert worker.engine.parts.counters.verify_max_rel_error <= TOLERANCE[torch.float32]


def test_no_token_is_given_out_that_lacks_a_part_of_its_attention(make):
    worker = make(budget_tokens=128, config='{"recall": "off"}')
    worker.admit(500)
    worker.step()
    worker.engine.end_step()
    worker.attendant.stop()
    worker.ring.timeout_us = 1000
    worker.step()
    with pytest.raises(RuntimeError, match="no answer in time; its tokens are not returned"):
        worker.engine.end_step()


def test_pages_that_running_steps_write_are_known_and_no_others(make):
    """Two steps may be running: the host has the results of the one before them."""
    rng = np.random.default_rng(2)
    worker = make(layers=2, max_batch=3, verify=False, config='{"recall": "fixed"}')
    pages, every = worker.engine.pages, np.arange(worker.host.num_pages)
    written, built = [set(), set()], [set(), set()]
    for _ in range(25):
        if len(worker.requests) < 3 and (not worker.requests or rng.random() < 0.5):
            worker.admit(int(rng.integers(1, 200)))
        before, known = worker.host.v[1].clone(), worker.digests.valid.copy()
        worker.step()
        new = every[worker.digests.valid & ~known]
        built = [built[1], set(new.tolist())]
        changed = (worker.host.v[1] != before).flatten(1).any(1)
        written = [written[1], set(torch.nonzero(changed)[:, 0].tolist())]
        assert written[1] == {r.pages[(r.length - 1) // SIZE] for r in worker.requests}
        for request in [r for r in worker.requests if rng.random() < 0.1]:
            full = np.array(request.pages[: (request.length - 1) // SIZE], np.int64)
            worker.finish(request)  # SGLang sees it after the next step has begun
            full = np.setdiff1d(full, list(written[0] | built[0] | built[1]))
            assert not pages.may_be_written(full)
        found = {page for page in every.tolist() if pages.may_be_written(np.array([page]))}
        assert found == set().union(*written, *built)
        assert not pages.may_be_written(np.zeros(0, np.int64))


@pytest.mark.parametrize("digest", ["minmax", "rotated-2"])
def test_what_boundaries_launch_is_compiled_before_the_first_request(make, digest):
    """Without side effects: it touches only the padding page and a free slot."""
    ran = []

    def noting(name, run):
        return lambda *args: ran.append(name) or run(*args)

    with replaced(noting):
        worker = make(layers=2, config=f'{{"digest": "{digest}"}}')
    before = set(ran)
    counts = (worker.digests.computed, worker.digests.received, worker.digests.valid.sum())
    assert counts == (0, 0, 0) and worker.table.resident_pages == 0
    assert list(worker.digests.accept(np.arange(3))) == [0, 1, 2]
    worker.admit(500)
    with replaced(noting):
        worker.step()
    assert worker.digests.computed == 15 and worker.engine.parts.counters.warmed_pages > 0
    of_boundaries = {op for op in ran if op.startswith(("build_", "copy_"))}
    assert len(of_boundaries) == 2 and of_boundaries <= before
