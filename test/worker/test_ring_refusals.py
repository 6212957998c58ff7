"""Records that a worker must refuse, answers that a producer must not take, slots left alone."""

from __future__ import annotations

import numpy as np
import pytest

from ring_view import CLOSED_ITEM, RingView
from sglang_scout.worker.arena import Arena
from worker_cases import close, make_request, oracle, until

# Records written by these tests do not wake the futex: let the threads poll.
POLL_US = 300_000


def raw_post(arena: Arena, at: tuple[int, int], epoch: int, request, **changes) -> int:
    """Writes a record of (layer, step), bypassing the producer's checks; returns its slot."""
    layer, step = at
    view = RingView(arena)
    q, pages, n_pages = request
    slot = view.slot(layer, step)
    data = view.record_data(slot)
    data[0][: len(q)], data[1][: len(q), : pages.shape[1]], data[2][: len(q)] = q, pages, n_pages
    post = int(view.control["head"]) + 1
    fields = {"seq": epoch << 40 | post, "layer": layer, "rows": len(q), "parts": 1} | changes
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
    "negative count": ({}, lambda pages, n: (pages, n * 0 - 1)),
    "one bad row of four": ({}, lambda pages, n: (pages, n + [0, 0, 1, 0])),
    "layer": ({"layer": 3}, None),
    "layer of another slot": ({"layer": 1}, None),
    "parts": ({"parts": 2}, None),
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


def test_a_damaged_record_is_computed_by_the_caller(make_ring):
    """From its own copy of the ids; those in the record point outside the arena."""
    ring = make_ring()
    ring.mute()
    request = make_request(ring.arena.spec, 3, 2, full=True)
    ticket = ring.post(0, 0, *request)
    _, pages, n_pages = ring.view.record_data(0)
    pages[:], n_pages[:] = 1 << 30, 1 << 20
    *answer, fallback = ring.wait(ticket, 0, 0, 3, timeout_us=1000)
    assert fallback == 3 * ring.arena.spec.max_pages
    close(answer, oracle(ring.arena, 0, *request))


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


def test_a_worker_that_begins_at_a_damaged_head_serves(make_ring):
    ring = make_ring()
    ring.view.control["head"] = 1 << 38
    ring.live()
    request = make_request(ring.arena.spec, 3, 2, full=True)
    assert ring.serve(0, 0, request, timeout_us=2_000_000)[2] == 0


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
