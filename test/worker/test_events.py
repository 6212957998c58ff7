"""Trace events of worker threads for the timeline, and a reader that validates all of them."""

import os
import signal
import time

import numpy as np
import pytest

from sglang_scout.worker.client import WorkerClient
from sglang_scout.worker.ring import EVENT_DTYPE
from worker_cases import buffers, make_request, until

EVENT_ENTRIES = 256  # of a thread


@pytest.fixture
def traced(make_ring):
    """An ordinary ring whose threads are traced."""
    ring = make_ring()
    ring.producer.set_trace(True)
    return ring


def read(ring, start=0):
    """The events of a thread, where to continue, and how many are lost."""
    buffer = np.zeros(EVENT_ENTRIES, EVENT_DTYPE)
    following, count, lost = ring.producer.read_events(0, start, buffer.view(np.uint8))
    return buffer[:count], following, lost


def serve(ring, requests):
    """One at a time: request n is of layer n % L, step n // L. Returns the epoch."""
    epoch, layers = ring.live(), ring.arena.spec.num_layers
    for n, request in enumerate(requests):
        assert ring.serve(n % layers, n // layers, request)[2] == 0
    ring.die()
    return epoch


def test_events_are_in_order_and_say_what_was_done(traced):
    requests = [make_request(traced.arena.spec, 3, n, full=n % 2 == 0) for n in range(7)]
    before_ns = time.monotonic_ns()
    epoch = serve(traced, requests)
    events, following, lost = read(traced)
    assert (len(events), following, lost) == (7, 7, 0)
    for n, (event, (_, pages, n_pages)) in enumerate(zip(events, requests, strict=True)):
        assert int(event["seq"]) == epoch << 40 | n + 1
        assert (event["layer"], event["step"]) == (n % 3, n // 3)
        assert (event["first_item"], event["items"], event["splits"]) == (0, 3, 1)
        assert event["pages"] == sum((pages[b, : n_pages[b]] >= 0).sum() for b in range(3))
    times = [before_ns, *(int(e[k]) for e in events for k in ("begin_ns", "end_ns"))]
    assert times == sorted(times) and times[-1] <= time.monotonic_ns()
    busy_ns = sum(int(e["end_ns"] - e["begin_ns"]) for e in events)
    assert busy_ns >= int(traced.view.stats["busy_ns"].sum())
    assert read(traced, following)[1:] == (7, 0)


@pytest.mark.parametrize("first", [0, (1 << 32) - 100, (1 << 64) - 100])
def test_wrap_around_keeps_the_newest(traced, first):
    traced.view.stats["events"][0] = first
    request = make_request(traced.arena.spec, 1, 1, full=True)
    serve(traced, [request] * (EVENT_ENTRIES + 44))
    events, following, lost = read(traced, first)
    assert following == (first + EVENT_ENTRIES + 44) % (1 << 64)
    seqs = [int(s) & ((1 << 40) - 1) for s in events["seq"]]
    if first < 1 << 63:
        assert lost == 44 and seqs == list(range(45, EVENT_ENTRIES + 45))
    else:  # a count that wraps 64 bits is corrupted: nothing is accepted, nothing breaks
        assert seqs == []
    assert len(read(traced, following)[0]) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("stamp", 77), ("layer", 3), ("items", 5), ("first_item", 0xFFFFFFFF), ("splits", 17)],
        *[("pages", 33), ("seq", 1), ("seq", 9 << 40 | 1)],  # no epoch, an epoch to come
        *[("end_ns", 1), ("end_ns", 1 << 62)],  # before it begins, in the future
    ],
)
def test_a_damaged_event_is_left_out_and_counted(traced, field, value):
    serve(traced, [make_request(traced.arena.spec, 4, 1, full=True)] * 3)
    traced.view.events[0, 1][field] = value
    events, following, lost = read(traced)
    assert [int(e["seq"]) & 0xFF for e in events] == [1, 3] and (following, lost) == (3, 1)


def test_client_reads_each_event_once_over_a_restart(make_arena, cpu):
    arena = make_arena()
    request = make_request(arena.spec, 2, 1, full=True)
    with WorkerClient(arena, [cpu]) as client:

        def serve_one(step):
            reply = client.wait(client.post(0, step, *request), *buffers(arena, 2))
            assert reply.fallback_pages == 0

        def events_of(step):
            """All up to the event of ``step``, which is waited for."""
            serve_one(step)
            found: list = []
            while not any(step in e.events["step"] for e in found):
                found += client.take_events()[0]
            assert {(e.thread, e.cpu) for e in found} == {(0, cpu)}
            # The thread may still have been serving the previous record when recording began.
            events = np.concatenate([e.events for e in found])
            assert events["step"].tolist() in ([step], [step - 1, step])
            return events

        serve_one(0)
        client.record_events(True)
        before, old = events_of(1), client.snapshot().pid
        os.kill(old, signal.SIGKILL)
        until(lambda: client.snapshot().pid not in (None, old), "a new worker")
        until(lambda: client.snapshot().state == "ready", "that it is ready")
        assert events_of(2)["seq"][0] >> 40 > before["seq"][-1] >> 40
        client.record_events(False)
        serve_one(3)
        until(lambda: client.snapshot().items == 8, "every item in the totals")
        assert client.take_events() == ([], 0)
