"""Producer and worker threads in one process: the protocol without process boundaries."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ring_view import RingView
from sglang_scout import _native
from sglang_scout.core.split import Split
from worker_cases import close, make_request, oracle


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("kv_dtype", "lists", "num_nodes", "threads"),
    [
        ("float32", 1, 1, [0, 0, 0]),
        ("float16", 2, 1, [0]),
        ("bfloat16", 2, 1, [0, 0]),
        ("bfloat16", 1, 2, [0, 0, 1]),
        ("float32", 2, 3, [2, 0, 1]),
        ("bfloat16", 1, 2, [1]),  # a node without a thread
        ("float16", 1, 16, [0, 15, 3]),
    ],
)
def test_the_worker_s_answer_is_the_oracle_s_and_bitwise_the_caller_s(
    make_arena, make_ring, kv_dtype, lists, num_nodes, threads, parts
):
    rounds = kv_dtype == "bfloat16"  # queries, and results: by half a unit in the last place
    sizes = {"lists": lists, "max_batch": 4 * lists, "num_nodes": num_nodes}
    q_dtype = "bfloat16" if rounds else "float32"
    arena = make_arena(kv_dtype=kv_dtype, q_dtype=q_dtype, **sizes)
    ring = make_ring(arena, threads=len(threads), parts=parts, nodes=threads)
    for layer in range(arena.spec.num_layers):
        request = make_request(arena.spec, 2 + layer, layer)
        ring.live()
        for step in range(3):
            *by_worker, fallback = ring.serve(layer, step, request)
            assert fallback == 0
        ring.die()
        *by_caller, fallback = ring.serve(layer, 3, request)
        assert fallback > 0
        assert all((x == y).all() for x, y in zip(by_worker, by_caller, strict=True))
        close(by_worker, oracle(arena, layer, *request), rtol=2**-8 if rounds else 2e-5)
        assert not (rounds and (by_worker[0].view(np.uint32) & 0xFFFF).any())
    assert ring.producer.totals()["local_tickets"] == arena.spec.num_layers, "the callers'"


@pytest.mark.parametrize("counts", [[8], [1, 0, 8], [8] * 64])
@pytest.mark.parametrize("split", [Split(12, 4, 1), Split(6, 3, 4), Split(3, 4, 2), Split(1, 1, 5)])
def test_the_producer_splits_by_the_rule(make_arena, make_ring, counts, split):
    ring = make_ring(make_arena(max_batch=64), threads=2, parts=4)
    ring.live()
    q, pages, n_pages = make_request(ring.arena.spec, len(counts), 1, full=True)
    n_pages[:] = counts
    pages[:, 1::2] = -1  # padding counts, as in the device's kernel, which does not check ids
    ring.producer.set_split(*split)
    ring.parts = 0
    assert ring.serve(0, 0, (q, pages, n_pages))[2] == 0
    batch = sum(n > 0 for n in counts), sum(counts), max(counts)
    assert int(ring.view.record(0)["parts"]) == _native.split_runs(*split, *batch)


def test_a_request_has_all_its_lists(make_arena, make_ring):
    q, pages, n_pages = make_request((arena := make_arena(lists=2)).spec, 2, 1)
    with pytest.raises(ValueError, match="post: 3 rows are not a multiple of the 2 lists"):
        make_ring(arena).post(0, 0, q, pages[:3], n_pages)


def test_no_pages_sends_nothing(make_ring):
    ring = make_ring()
    ring.live()
    q, pages, n_pages = make_request(ring.arena.spec, 3, 1)
    for empty in ((q, pages, n_pages * 0), (q, pages * 0 - 1, n_pages)):
        out, lse, fallback = ring.serve(0, 0, empty)
        assert (out == 0).all() and (lse == -np.inf).all() and fallback == 0
    assert int(ring.view.control["head"]) == 0


@pytest.mark.parametrize("head", [0, (1 << 32) - 5, (1 << 40) - 5])
def test_wrap_around(make_arena, make_ring, head):
    """The log wraps every 16 posts here; the numbers pass 32 and 40 bits."""
    arena = make_arena()
    RingView(arena).control["head"] = head  # the producer begins there
    ring = make_ring(arena, threads=3)
    ring.live()
    request = make_request(arena.spec, 4, 3, full=True)
    expected = oracle(arena, 2, *request)
    posts = 5 * arena.layout().log_entries
    for step in range(posts):
        *answer, fallback = ring.serve(2, step, request)
        close(answer, expected)
        assert fallback == 0
    assert int(ring.view.control["head"]) == head + posts
    assert ring.producer.totals()["records"] == posts


def test_a_ticket_is_good_once_and_until_its_slot_is_posted_again(make_ring):
    ring = make_ring()
    request = make_request(ring.arena.spec, 2, 1)
    first = ring.post(0, 0, *request)
    ring.wait(first, 0, 0, 2)
    old = ring.post(1, 0, *request)
    ring.post(1, 2, *request)
    for ticket, layer in ((first, 0), (old, 1), (0, 2)):
        with pytest.raises(ValueError, match=f"ticket {ticket} of layer {layer}.* is used up"):
            ring.wait(ticket, layer, 0, 2)


def test_waiter_learns_at_once_that_the_epoch_is_over(make_ring):
    ring = make_ring()
    ring.mute()
    request = make_request(ring.arena.spec, 2, 1, full=True)
    threading.Timer(0.1, ring.producer.set_live_epoch, (0,)).start()
    begin_s = time.monotonic()
    assert ring.serve(0, 0, request)[2] > 0 and time.monotonic() - begin_s < 5
    assert ring.producer.totals()["late_tickets"] == 0


def test_epochs_do_not_come_from_memory_that_a_worker_can_write(make_ring):
    ring = make_ring()
    assert ring.producer.next_epoch() == 1
    ring.view.control["epoch"] = (1 << 24) - 1
    assert ring.producer.next_epoch() == 2
