"""Trace events of worker threads for the timeline, and a reader that validates all of them."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from ring_view import RingView
from sglang_scout.worker.client import WorkerClient
from sglang_scout.worker.ring import EVENT_DTYPE
from worker_cases import make_request, until

EVENT_ENTRIES = 256  # of a thread


def read(ring, line, start=0):
    """The events of a thread, and the other results of read_events: where to continue, how many are lost."""
    buffer = np.zeros(EVENT_ENTRIES, EVENT_DTYPE)
    following, count, lost = ring.producer.read_events(line, start, buffer.ctypes.data)
    return buffer[:count], following, lost


def serve(ring, requests):
    """Posts and waits, one at a time: request n is of layer n % L, step n // L."""
    layers = ring.arena.spec.num_layers
    for n, request in enumerate(requests):
        layer, step = n % layers, n // layers
        ticket = ring.post(layer, step, *request)
        assert ring.wait(ticket, layer, step, len(request[0]))[2] == 0


def test_events_are_in_order_and_say_what_was_done(make_arena, make_ring):
    arena = make_arena()
    ring = make_ring(arena)
    ring.producer.set_trace(True)
    epoch = ring.live()
    requests = [make_request(arena.spec, 3, n, full=n % 2 == 0) for n in range(7)]
    before_ns = time.monotonic_ns()
    serve(ring, requests)
    ring.die()
    events, following, lost = read(ring, 0)
    assert (len(events), following, lost) == (7, 7, 0)
    for n, event in enumerate(events):
        assert int(event["seq"]) == epoch << 40 | n + 1
        assert (event["layer"], event["step"]) == (n % 3, n // 3)
        assert (event["first_item"], event["items"], event["parts"]) == (0, 3, 1)
        _, pages, n_pages = requests[n]
        asked = sum((pages[b, : n_pages[b]] >= 0).sum() for b in range(3))
        assert event["pages"] == asked
    times = [before_ns, *(int(e[k]) for e in events for k in ("begin_ns", "end_ns"))]
    assert times == sorted(times) and times[-1] <= time.monotonic_ns()
    busy_ns = sum(int(e["end_ns"] - e["begin_ns"]) for e in events)
    assert busy_ns >= int(RingView(arena).stats["busy_ns"].sum())
    assert read(ring, 0, following)[1:] == (7, 0)


@pytest.mark.parametrize("first", [0, (1 << 32) - 100, (1 << 64) - 100])
def test_wrap_around_keeps_the_newest(make_arena, make_ring, first):
    arena = make_arena()
    RingView(arena).stats["events"][0] = first
    ring = make_ring(arena)
    ring.producer.set_trace(True)
    ring.live()
    request = make_request(arena.spec, 1, 1, full=True)
    serve(ring, [request] * (EVENT_ENTRIES + 44))
    ring.die()
    events, following, lost = read(ring, 0, first)
    assert following == (first + EVENT_ENTRIES + 44) % (1 << 64)
    seqs = [int(s) & ((1 << 40) - 1) for s in events["seq"]]
    if first < 1 << 63:
        assert lost == 44 and seqs == list(range(45, EVENT_ENTRIES + 45))
    else:  # a count that wraps 64 bits is corrupted: nothing is accepted, nothing breaks
        assert seqs == []
    assert len(read(ring, 0, following)[0]) == 0


BAD_FIELDS = {
    "stamp": ("stamp", 77),
    "layer": ("layer", 3),
    "no epoch": ("seq", 1),
    "epoch to come": ("seq", 9 << 40 | 1),
    "too many items": ("items", 5),
    "huge first item": ("first_item", 0xFFFFFFFF),
    "parts": ("parts", 17),
    "pages": ("pages", 33),
    "ends before it begins": ("end_ns", 1),
    "from the future": ("end_ns", 1 << 62),
}


@pytest.mark.parametrize("what", BAD_FIELDS)
def test_a_damaged_event_is_left_out_and_counted(make_arena, make_ring, what):
    arena = make_arena()
    ring = make_ring(arena)
    ring.producer.set_trace(True)
    ring.live()
    serve(ring, [make_request(arena.spec, 4, 1, full=True)] * 3)
    ring.die()
    field, value = BAD_FIELDS[what]
    RingView(arena).events[0, 1][field] = value
    events, following, lost = read(ring, 0)
    assert [int(e["seq"]) & 0xFF for e in events] == [1, 3] and (following, lost) == (3, 1)


def test_client_reads_each_event_once_over_a_restart(make_arena, cpu):
    arena = make_arena()
    request = make_request(arena.spec, 2, 1, full=True)
    out, lse = np.empty_like(request[0]), np.empty(request[0].shape[:2], np.float32)
    with WorkerClient(arena, [cpu]) as client:

        def serve_one(step):
            reply = client.wait(client.post(0, step, *request), out, lse)
            assert reply.fallback_pages == 0

        def taken(step):
            """Everything up to the event of ``step``: its lanes, each with its events."""
            found: list = []

            def is_there():
                found.extend(client.take_events()[0])
                return any(step in e.events["step"] for e in found)

            until(is_there, f"the event of step {step}")
            return found

        serve_one(0)
        client.record_events(True)
        serve_one(1)
        before = taken(1)
        old = client.snapshot().pid
        os.kill(old, signal.SIGKILL)
        until(lambda: client.ready and client.snapshot().pid != old, "a new worker")
        serve_one(2)
        after = taken(2)
        for step, got in ((1, before), (2, after)):
            assert {(e.thread, e.cpu) for e in got} == {(0, cpu)}
            # The thread may still have been serving the previous record when recording began.
            steps = np.concatenate([e.events["step"] for e in got]).tolist()
            assert steps in ([step], [step - 1, step])
        assert after[0].events["seq"][0] >> 40 > before[-1].events["seq"][-1] >> 40
        client.record_events(False)
        serve_one(3)
        until(lambda: client.snapshot().items == 8, "every item in the totals")
        assert client.take_events() == ([], 0)
