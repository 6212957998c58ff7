"""Producer and worker threads in one process: the protocol without a process in between."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_scout import _native
from sglang_scout.core.split import Split
from sglang_scout.worker.ring import LAYOUT_VERSION
from sglang_scout.worker.settings import MAX_THREADS_PER_GROUP
from sglang_scout.worker.spec import MAX_NODES

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # fp32 sums in another order than the oracle's float64


def test_constants_agree():
    assert _native.RING_LAYOUT_VERSION == LAYOUT_VERSION
    assert _native.RING_MAX_PARTS == MAX_THREADS_PER_GROUP
    assert _native.RING_MAX_NODES == MAX_NODES


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parts", [1, 3])
def test_round_trip_over_layers_and_steps(
    make_arena, make_ring, make_request, oracle, kv_dtype, parts
):
    arena = make_arena(kv_dtype=kv_dtype, logit_cap=5.0 if parts == 3 else 0.0)
    ring = make_ring(arena, threads=3, parts=parts)
    ring.live()
    fallbacks = 0
    for step in range(6):
        for layer in range(arena.spec.num_layers):
            request = make_request(arena.spec, 1 + (step + layer) % 4, 100 * step + layer)
            ticket = ring.post(layer, step, *request)
            out, lse, fallback = ring.wait(ticket, layer, step, len(request[0]))
            fallbacks += fallback
            expected_out, expected_lse = oracle(arena, layer, *request)
            np.testing.assert_allclose(out, expected_out, **TOLERANCE)
            np.testing.assert_allclose(lse, expected_lse, **TOLERANCE)
    assert fallbacks == 0 and ring.producer.totals()["local_tickets"] == 0


@pytest.mark.parametrize("parts", [1, 4])
def test_caller_computes_bitwise_the_same(make_arena, make_ring, make_request, parts):
    arena = make_arena(kv_dtype="bfloat16")
    ring = make_ring(arena, threads=2, parts=parts)
    request = make_request(arena.spec, 4, 1)
    ring.live()
    by_worker = ring.wait(ring.post(1, 0, *request), 1, 0, 4)
    ring.die()
    by_caller = ring.wait(ring.post(1, 1, *request), 1, 1, 4)
    assert by_worker[2] == 0 and by_caller[2] > 0
    assert (by_worker[0] == by_caller[0]).all() and (by_worker[1] == by_caller[1]).all()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=64).filter(any),
    split=st.builds(Split, st.integers(1, 12), st.integers(1, 4), st.integers(1, 5)),
)
def test_the_producer_splits_by_the_rule(posted_parts, counts, split):
    assert posted_parts(counts, split) == split.runs(
        sum(n > 0 for n in counts), sum(counts), max(counts)
    )


@pytest.fixture
def posted_parts(make_arena, make_ring, make_request):
    """How many runs a record of rows with so many pages says, which the worker then serves."""
    arena = make_arena(max_batch=64)
    ring = make_ring(arena, threads=2, parts=4)
    ring.live()
    step = 0

    def parts_of(counts, split):
        nonlocal step
        step += 1
        q, pages, n_pages = make_request(arena.spec, len(counts), step, full=True)
        n_pages[:] = counts
        pages[:, 1::2] = -1  # padding counts as it does in a device's kernel, which sees no ids
        ring.producer.set_split(*split)
        ring.parts = 0
        ticket = ring.post(0, step, q, pages, n_pages)
        parts = int(arena.ring().record(step % 2 * arena.spec.num_layers)["parts"])
        assert ring.wait(ticket, 0, step, len(counts))[2] == 0
        return parts

    return parts_of


@pytest.mark.parametrize("split", [(0, 1, 1), (1, 0, 1), (1, 17, 1), (1, 1, 0)])
def test_an_impossible_split_is_refused(make_arena, split):
    arena = make_arena()
    with pytest.raises(ValueError, match="split of"):
        _native.RingProducer(arena.address, arena.nbytes).set_split(*split)


def test_two_layers_in_flight_and_arguments_reused(make_arena, make_ring, make_request, oracle):
    arena = make_arena()
    ring = make_ring(arena, threads=2)
    ring.live()
    spec = arena.spec
    buffers = make_request(spec, 4, 0)
    pending: list[tuple] = []
    for n in range(60):
        layer, step = n % spec.num_layers, n // spec.num_layers
        request = make_request(spec, 4, n)
        for buffer, values in zip(buffers, request, strict=True):
            buffer[:] = values
        pending.append((ring.post(layer, step, *buffers), layer, step, request))
        for buffer in buffers:
            buffer[:] = 0  # the record is a copy
        if len(pending) == 2:
            ticket, layer, step, request = pending.pop(0)
            out, lse, _ = ring.wait(ticket, layer, step, 4)
            expected = oracle(arena, layer, *request)
            np.testing.assert_allclose(out, expected[0], **TOLERANCE)
            np.testing.assert_allclose(lse, expected[1], **TOLERANCE)
    assert ring.producer.totals()["local_tickets"] == 0


def test_no_pages_sends_nothing(make_arena, make_ring, make_request):
    arena = make_arena()
    ring = make_ring(arena)
    ring.live()
    q, pages, n_pages = make_request(arena.spec, 3, 1)
    for empty in ((q, pages, n_pages * 0), (q, pages * 0 - 1, n_pages)):
        out, lse, fallback = ring.wait(ring.post(0, 0, *empty), 0, 0, 3)
        assert (out == 0).all() and (lse == -np.inf).all() and fallback == 0
    assert int(arena.ring().control["head"]) == 0


@pytest.mark.parametrize("head", [0, (1 << 32) - 5, (1 << 40) - 5])
def test_wrap_around(make_arena, make_ring, make_request, oracle, head):
    """The log wraps every 16 posts here; the numbers pass 32 and 40 bits."""
    arena = make_arena()
    arena.ring().control["head"] = head
    ring = make_ring(arena, threads=3)
    ring.live()
    request = make_request(arena.spec, 4, 3, full=True)
    expected = oracle(arena, 2, *request)
    posts = 5 * arena.layout().log_entries
    for step in range(posts):
        out, _, fallback = ring.wait(ring.post(2, step, *request), 2, step, 4)
        assert fallback == 0
        np.testing.assert_allclose(out, expected[0], **TOLERANCE)
    assert int(arena.ring().control["head"]) == head + posts
    assert ring.producer.totals()["records"] == posts


def test_threads_on_few_cpus_lose_nothing(make_arena, make_ring, make_request, until):
    """More threads than cores, three parts a row: every record is finished once, by bits."""
    arena = make_arena()
    ring = make_ring(arena, threads=5, parts=3)
    request = make_request(arena.spec, 4, 9, full=True)
    reference = ring.wait(ring.post(0, 0, *request), 0, 0, 4)
    ring.live()
    for n in range(1, 1500):
        out, lse, fallback = ring.wait(ring.post(0, n, *request), 0, n, 4)
        assert fallback == 0 and (out == reference[0]).all() and (lse == reference[1]).all()
    # A thread counts an item after it has given the answer away.
    expected = 1499 * 4 * 3, 1499, 1499 * 4 * arena.spec.max_pages

    def counted():
        totals = ring.producer.totals()
        return (totals["items"], totals["records"], totals["pages"]) == expected

    until(counted, "every item in the totals")
    assert ring.producer.totals()["busy_us"] > 0


def test_caller_s_mistakes_are_named(make_arena, make_ring, make_request):
    arena = make_arena()
    ring = make_ring(arena)
    q, pages, n_pages = make_request(arena.spec, 2, 1, full=True)
    bad = pages.copy()
    bad[1, 3] = 40
    with pytest.raises(ValueError, match=r"post: page id 40 of row 1 is outside 0\.\.39"):
        ring.post(0, 0, q, bad, n_pages)
    with pytest.raises(ValueError, match=r"post: n_pages 9 of row 0 is outside 0\.\.8"):
        ring.post(0, 0, q, pages, n_pages + 1)
    with pytest.raises(ValueError, match=r"post: layer 3 is outside 0\.\.2"):
        ring.post(3, 0, q, pages, n_pages)
    rows = np.repeat(q, 3, 0), np.repeat(pages, 3, 0), np.repeat(n_pages, 3)
    with pytest.raises(ValueError, match=r"post: rows 6 is outside 0\.\.4"):
        ring.post(0, 0, *rows)


def test_a_ticket_is_good_once_and_until_its_slot_is_posted_again(
    make_arena, make_ring, make_request
):
    arena = make_arena()
    ring = make_ring(arena)
    request = make_request(arena.spec, 2, 1)
    first = ring.post(0, 0, *request)
    ring.wait(first, 0, 0, 2)
    old = ring.post(1, 0, *request)
    ring.post(1, 2, *request)
    for ticket, layer in ((first, 0), (old, 1), (0, 2)):
        with pytest.raises(ValueError, match=f"ticket {ticket} of layer {layer}.* is used up"):
            ring.wait(ticket, layer, 0, 2)


def test_waiter_learns_at_once_that_the_life_is_over(make_arena, make_ring, make_request):
    arena = make_arena()
    ring = make_ring(arena)
    ring.producer.set_life(ring.producer.next_epoch())
    request = make_request(arena.spec, 2, 1, full=True)
    ticket = ring.post(0, 0, *request)
    ended_s: list[float] = []

    def end() -> None:
        time.sleep(0.1)
        ended_s.append(time.monotonic())
        ring.producer.set_life(0)

    thread = threading.Thread(target=end)
    thread.start()
    _, _, fallback = ring.wait(ticket, 0, 0, 2)
    late_s = time.monotonic() - ended_s[0]
    thread.join()
    assert fallback > 0 and late_s < 5 and ring.producer.totals()["late_tickets"] == 0


operations = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(0, 2), st.integers(0, 4), st.integers(0, 99)),
        st.tuples(st.just("wait"), st.integers(0, 5)),
        st.tuples(st.just("live")),
        st.tuples(st.just("die")),
        st.tuples(st.just("hang")),
    ),
    max_size=40,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(operations)
def test_any_order_of_posts_waits_and_lives(make_arena, make_ring, make_request, oracle, ops):
    """Whatever happens to the worker in between, each ticket gets exactly its own answer."""
    arena = make_arena()
    ring = make_ring(arena, threads=2, parts=2)
    open_tickets: dict[int, tuple] = {}
    step_of = [0, 0, 0]
    try:
        for op, *args in ops:
            if op == "post":
                layer, rows, seed = args
                step = step_of[layer]
                step_of[layer] += 1
                request = make_request(arena.spec, rows, seed)
                ticket = ring.post(layer, step, *request)
                open_tickets[arena.ring().slot(layer, step)] = (ticket, layer, step, request)
            elif op == "wait" and args[0] in open_tickets:
                ticket, layer, step, request = open_tickets.pop(args[0])
                out, lse, _ = ring.wait(ticket, layer, step, len(request[0]), timeout_us=50_000)
                expected = oracle(arena, layer, *request)
                np.testing.assert_allclose(out, expected[0], **TOLERANCE)
                np.testing.assert_allclose(lse, expected[1], **TOLERANCE)
            elif op == "live":
                ring.live()
            elif op == "die":
                ring.die()
            elif op == "hang" and ring.runtime is not None:
                ring.runtime.stop()  # the client does not know yet
    finally:
        ring.die()
