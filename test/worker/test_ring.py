"""Producer and worker threads in one process: the protocol without process boundaries. At the end: records that a
worker must refuse, answers that a producer must not take, slots left alone."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring_view import CLOSED_ITEM, RingView
from sglang_scout import _native
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.ring import Split
from worker_cases import close, make_request, oracle, until

TWO_LISTS = {"lists": 2, "max_batch": 8}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("kv_dtype", "sizes", "threads"),
    [
        ("float32", {}, [0, 0, 0]),
        ("float32", {"num_kv_heads": 1, "context_pages": 20}, [0, 0]),
        ("float16", TWO_LISTS, [0]),
        ("bfloat16", TWO_LISTS, [0, 0]),
        ("bfloat16", {"num_nodes": 2}, [0, 0, 1]),
        ("float32", {"num_nodes": 3, **TWO_LISTS}, [2, 0, 1]),
        ("bfloat16", {"num_nodes": 2}, [1]),  # a node without a thread
        ("float16", {"num_nodes": 16}, [0, 15, 3]),
    ],
)
def test_the_worker_s_answer_is_the_oracle_s_and_bitwise_the_caller_s(
    make_arena, make_ring, kv_dtype, sizes, threads, splits
):
    rounds = kv_dtype == "bfloat16"  # queries, and results: by half a unit in the last place
    q_dtype = "bfloat16" if rounds else "float32"
    arena = make_arena(kv_dtype=kv_dtype, q_dtype=q_dtype, **sizes)
    ring = make_ring(arena, threads=len(threads), splits=splits, nodes=threads)
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


def splits_of(split: Split, pages: list[int]) -> int:
    return _native.splits_of(*split, sum(n > 0 for n in pages), sum(pages), max(pages))


@pytest.mark.parametrize("counts", [[8], [1, 0, 8], [8] * 64])
@pytest.mark.parametrize("split", [Split(12, 4, 1), Split(6, 3, 4), Split(3, 4, 2), Split(1, 1, 5)])
def test_the_producer_splits_by_the_rule(make_arena, make_ring, counts, split):
    ring = make_ring(make_arena(max_batch=64), threads=2, splits=4)
    ring.live()
    q, pages, n_pages = make_request(ring.arena.spec, len(counts), 1, full=True)
    n_pages[:] = counts
    pages[:, 1::2] = -1  # padding counts, as in the device's kernel, which does not check ids
    ring.producer.set_split(*split)
    ring.splits = 0
    assert ring.serve(0, 0, (q, pages, n_pages))[2] == 0
    assert int(ring.view.record(0)["splits"]) == splits_of(split, counts)


@pytest.mark.parametrize(
    ("pages", "splits"),
    [
        ([64], 8),  # one sequence: up to `most` threads
        ([3], 1),  # splits of at least two pages
        ([64] * 5, 7),  # 36 threads: seven each, one left over
        ([64] * 10, 7),  # two rounds of nine pages; three splits each would be one round of 21
        ([64] * 36, 1),
        ([64] * 37, 8),  # one each would leave the last to a single thread
        ([8, 64, 0, 0, 8], 8),
        ([6] * 600 + [64], 1),  # it is done when the others are
        ([0, 0], 1),
    ],
)
def test_what_keeps_36_threads_busy(pages, splits):
    assert splits_of(Split(), pages) == 1, "one thread splits nothing"
    assert splits_of(Split(threads=36, max_splits=8, min_pages=2), pages) == splits


@given(
    st.lists(st.integers(0, 4096), min_size=1, max_size=64),
    st.builds(Split, st.integers(1, 256), st.integers(1, 16), st.integers(1, 600)),
)
def test_runs_are_within_bounds_and_no_shorter_than_worth_it(pages, split):
    splits = splits_of(split, pages)
    assert 1 <= splits <= split.max_splits
    if splits > 1:
        assert max(pages) >= splits * split.min_pages
        assert splits * sum(n > 0 for n in pages) <= _native.SPLITS_PER_THREAD * split.threads


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
    posts = 5 * arena.layout.log_entries
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
        with pytest.raises(RuntimeError, match=f"ticket {ticket} of layer {layer}.* is used up"):
            ring.wait(ticket, layer, 0, 2)


def test_waiter_learns_at_once_that_the_epoch_is_over(make_ring):
    ring = make_ring()
    ring.mute()
    request = make_request(ring.arena.spec, 2, 1, full=True)
    threading.Timer(0.1, ring.producer.set_live_epoch, (0,)).start()
    begin_s = time.monotonic()
    assert ring.serve(0, 0, request)[2] > 0 and time.monotonic() - begin_s < 5
    assert ring.producer.totals()["late_tickets"] == 0


def test_neither_epochs_nor_posts_come_from_memory_that_a_worker_can_write(make_ring):
    ring = make_ring()
    assert ring.producer.next_epoch() == 1
    ring.view.control["epoch"], ring.view.control["head"] = (1 << 24) - 1, 1 << 38
    assert ring.live() == 2
    request = make_request(ring.arena.spec, 3, 2, full=True)
    assert ring.serve(0, 0, request, timeout_us=2_000_000)[2] == 0


# Records written by these tests do not wake the futex: let the threads poll.
POLL_US = 300_000


def raw_post(arena: Arena, at: tuple[int, int], epoch: int, request, **changes) -> int:
    """Writes a record of (layer, step), bypassing the producer's checks; returns its slot."""
    layer, step = at
    view, q = RingView(arena), request[0]
    slot = view.slot(layer, step)
    for words, values in zip(view.record_data(slot), request, strict=True):
        words[: len(q)] = values
    post = int(view.control["head"]) + 1
    fields = {"seq": epoch << 40 | post, "layer": layer, "rows": len(q), "splits": 1} | changes
    for name, value in fields.items():
        view.record(slot)[name] = value
    view.reply(slot)["claim"] = post << 24
    view.log[post % len(view.log)] = post << 24 | slot
    view.control["head"] = post
    return slot


def answered(ring, slot: int) -> int:
    """The status of an answer that is waited for."""
    record, reply = ring.view.record(slot), ring.view.reply(slot)
    until(lambda: int(reply["done"]) == int(record["seq"]), "an answer")
    return int(reply["status"])


BAD_RECORDS = {  # changes of the header's fields, of (pages, n_pages)
    "page id": ({}, lambda pages, n: (pages * 0 + 40, n * 0 + 1)),
    "count": ({}, lambda pages, n: (pages, n * 0 + 9)),
    "one bad row of four": ({}, lambda pages, n: (pages, n + [0, 0, 1, 0])),
    "layer": ({"layer": 3}, None),
    "layer of another slot": ({"layer": 1}, None),
    "splits": ({"splits": 2}, None),
    "huge rows": ({"rows": 0xFFFFFFFF}, None),
}


@pytest.mark.parametrize("what", BAD_RECORDS)
def test_bad_record_is_refused_counted_and_harmless(make_ring, what):
    ring = make_ring(threads=2)
    epoch = ring.live(POLL_US)
    changes, spoil = BAD_RECORDS[what]
    request = make_request(ring.arena.spec, 4, 5, full=True)
    bad = (request[0], *spoil(*request[1:])) if spoil else request
    slot = raw_post(ring.arena, (0, 0), epoch, bad, **changes)
    assert answered(ring, slot) == 1
    totals = ring.producer.totals()
    assert totals["refused"] == 1 and totals["records"] == 1 and totals["stale"] == 0
    # The next valid one is served.
    slot = raw_post(ring.arena, (0, 0), epoch, request)
    assert answered(ring, slot) == 0
    close(ring.view.reply_data(slot), oracle(ring.arena, 0, *request))


def test_record_of_another_epoch_is_refused_unanswered(make_ring):
    ring = make_ring(threads=2)
    epoch = ring.live(POLL_US)
    request = make_request(ring.arena.spec, 2, 5, full=True)
    for count, other in enumerate((epoch - 1, epoch + 1), 1):
        slot = raw_post(ring.arena, (1, count), other, request)
        until(lambda count=count: ring.producer.totals()["stale"] == count, "stale record")
        assert int(ring.view.reply(slot)["done"]) == 0
        assert int(ring.view.reply(slot)["claim"][0]) & CLOSED_ITEM == CLOSED_ITEM
    assert ring.producer.totals()["refused"] == 0 and ring.producer.totals()["items"] == 0


def test_stale_answers_are_never_taken(make_ring):
    """A reply to an earlier record, or of an earlier epoch, is not accepted."""
    ring = make_ring()
    request = make_request(ring.arena.spec, 3, 2, full=True)
    expected = oracle(ring.arena, 0, *request)
    for step in range(4):
        epoch = ring.mute()
        ticket = ring.post(0, step, *request)
        slot = ring.view.slot(0, step)
        seq = int(ring.view.record(slot)["seq"])
        assert seq >> 40 == epoch
        ring.view.reply_data(slot)[0][:] = 1e9
        for wrong in (seq - 1, seq - (1 << 40), seq + (1 << 40), seq & ((1 << 40) - 1)):
            ring.view.reply(slot)["done"] = wrong
        *answer, fallback = ring.wait(ticket, 0, step, 3, timeout_us=2000)
        assert fallback == 3 * ring.arena.spec.max_pages
        close(answer, expected)
    assert ring.producer.totals()["late_tickets"] == 4


@pytest.mark.parametrize(("what", "value"), [(0, np.nan), (0, np.inf), (1, np.nan), (1, np.inf)])
def test_an_answer_that_is_no_number_is_computed_by_the_caller(make_ring, what, value):
    ring = make_ring()
    ring.mute()
    request = make_request(ring.arena.spec, 3, 2, full=True)
    ticket = ring.post(0, 0, *request)
    written = ring.view.reply_data(0)
    written[0][:], written[1][:] = 1.0, 0.0
    written[what][2, -1] = value
    ring.view.reply(0)["done"] = ring.view.record(0)["seq"]
    *answer, fallback = ring.wait(ticket, 0, 0, 3)
    assert fallback == 3 * ring.arena.spec.max_pages and ring.producer.totals()["refused"] == 1
    close(answer, oracle(ring.arena, 0, *request))


def test_a_busy_slot_is_not_filled_again(make_ring):
    ring = make_ring()
    ring.mute()
    first, second = (make_request(ring.arena.spec, 3, seed, full=True) for seed in (1, 2))
    _, _, fallback = ring.serve(0, 0, first, timeout_us=1000)
    assert fallback > 0
    header, q = ring.view.record(0).tobytes(), ring.view.record_data(0)[0].copy()
    *answer, fallback = ring.serve(0, 2, second)
    assert fallback > 0 and ring.producer.totals()["local_tickets"] == 1
    close(answer, oracle(ring.arena, 0, *second))
    assert ring.view.record(0).tobytes() == header
    assert (ring.view.record_data(0)[0] == q).all()
    # The answer arrives late: the slot is free again. A new epoch frees it too.
    ring.view.reply(0)["done"] = ring.view.record(0)["seq"]
    ring.post(0, 4, *first)
    assert ring.producer.totals()["local_tickets"] == 1
    ring.live()
    assert ring.serve(0, 6, first)[2] == 0
