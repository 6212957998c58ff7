"""When pages are sealed, and that every read of a host page verifies it."""

from functools import partial

import numpy as np
import pytest
import torch

from graph_worker import GraphWorker
from mini_worker import SIZE


@pytest.fixture
def make(make):
    """No verifier: it reads host pages too, so it would accept a damaged page."""
    config = '{"page_checksums": true, "recall": "off"}'
    return partial(make, GraphWorker, verify=False, config=config)


def is_sealed(worker, pages):
    """``[n]`` in all layers; False also if in none."""
    words = worker.host.checksums.words[:, pages]
    assert ((words != 0).all(axis=0) == (words != 0).any(axis=0)).all()
    return (words != 0).all(axis=0).tolist()


def flip(worker, layer, page):
    worker.arena.k_pages(layer)[page].reshape(-1).view(np.uint8)[77] ^= 16


def test_a_page_is_sealed_when_the_step_that_filled_it_has_ended(make):
    worker = make()
    request = worker.admit(4 * SIZE + SIZE - 2)
    worker.step()
    worker.step()
    assert request.length == 5 * SIZE, "the tail is full"
    assert is_sealed(worker, request.pages) == [True] * 4 + [False]
    worker.step()
    assert is_sealed(worker, request.pages) == [True] * 4 + [False] * 2, "that step may still run"
    worker.step()
    assert is_sealed(worker, request.pages) == [True] * 5 + [False]
    checksums = worker.host.checksums
    layers, pages = (x.flatten() for x in np.meshgrid(range(3), request.pages[:5]))
    checksums.check(layers, pages)
    assert not checksums.failures, "it was sealed with all its tokens"


def test_pages_are_sealed_on_arrival_and_stay_so_until_they_are_freed(make):
    worker = make()
    request = worker.bring(3 * SIZE + 5)
    full = np.array(request.pages[:3])
    worker.engine.requests.arrive("r", full, None)
    assert is_sealed(worker, request.pages) == [True] * 3 + [False]
    flip(worker, 1, request.pages[1])
    worker.engine.requests.arrive("another that shares them", full, None)
    worker.engine.pages.seal(full)
    checksums = worker.host.checksums
    checksums.check(np.full(3, 1), full)
    assert checksums.damaged().tolist() == [[1, request.pages[1]]]
    worker.finish(request)
    assert is_sealed(worker, full) == [False] * 3 and not len(checksums.damaged())


def test_a_page_that_was_freed_before_it_was_sealed_is_left_to_its_next_owner(make):
    worker = make()
    first, other = worker.admit(2 * SIZE - 1), worker.admit(40)
    worker.step()  # fills it
    worker.step()  # finds it full
    pages = list(first.pages)
    worker.finish(first)
    worker.engine.pages.allocate_pages(np.array(pages))  # to a transfer
    worker.step()
    assert is_sealed(worker, pages) == [False] * 3 and is_sealed(worker, other.pages[:1]) == [True]


@pytest.mark.parametrize("threads", [True, False])
def test_a_page_that_is_computed_on_the_cpu_is_compared(make, threads):
    """By worker threads, or the attendant if there are none."""
    worker = make(threads=threads)
    requests = worker.admit(700), worker.admit(500)
    worker.run(4)
    assert not worker.host.checksums.failures
    for page in {p for r in requests for p in r.pages[: (r.length - 1) // SIZE]}:
        flip(worker, 1, page)
    worker.step()
    missed = worker.engine._results.missing[1].flatten().tolist()
    expected = [[1, page] for page in sorted(missed) if page >= 0]
    assert expected and worker.host.checksums.damaged().tolist() == expected
    assert all(torch.isfinite(out).all() for out in worker.outputs), "for the sampler"


def test_a_page_that_is_copied_is_compared_before_a_step_attends_to_it(make):
    """At a boundary, or during a step."""
    worker = make(resident_tokens=1024)
    request = worker.admit(700)
    worker.step()
    worker.step()
    recall, slot_of = worker.engine.recall, worker.table.slot_of
    absent = np.array([p for p in request.pages[:20] if slot_of[2, p] < 0])
    first, second = absent[:2], absent[2:4]
    flip(worker, 2, first[1])
    flip(worker, 2, second[0])
    recall.load_now(2, first, 3)
    recall.prefetch(2, second, "fill")
    recall.commit(3)
    assert (slot_of[2, absent[:4]] >= 0).all()
    assert worker.host.checksums.damaged().tolist() == [[2, first[1]], [2, second[0]]]
