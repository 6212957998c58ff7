"""The attendant, which answers records posted by kernels that no worker will answer."""

import os
import re
import time
from pathlib import Path

import pytest

from ring_cases import (
    KINDS,
    LAYERS,
    NEEDS_KERNELS,
    exchange,
    expected_of,
    request,
    ring_of,
    settle,
    state,
)
from ring_view import RingView
from sglang_scout import _native

pytestmark = NEEDS_KERNELS


@pytest.fixture
def attended(arena):
    """A producer, which provides the live epoch, and an attendant on its ring."""
    producer = _native.RingProducer(arena.address, arena.nbytes)
    attendant = _native.RingAttendant(producer, 50)
    yield producer, attendant
    settle()
    attendant.stop()


def test_an_idle_attendant_looks_less_and_less_often(attended):
    def naps():
        texts = [(p / "status").read_text() for p in Path("/proc/self/task").iterdir()]
        [status] = [text for text in texts if "\tscout-attendant\n" in text]
        return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[1])

    time.sleep(0.1)
    before, begin_s = naps(), time.monotonic()
    time.sleep(0.3)
    most = 3000 * (time.monotonic() - begin_s)
    assert naps() - before < most, "every 50 us they would be several thousand"


@KINDS
@pytest.mark.parametrize("parts", [1, 3])
def test_the_attendant_answers_what_no_worker_will(arena, attended, parts):
    """Records of an epoch without a worker, as after a worker's death."""
    producer, attendant = attended
    ring = ring_of(arena, parts=parts)
    ring.set_epoch(producer.next_epoch())
    posted = sum(exchange(arena, ring, step) for step in range(1, 4))
    assert attendant.pages() == posted


def test_the_attendant_leaves_a_living_worker_its_records(arena, attended):
    """And wakes its threads, which a kernel cannot: with spin 0 they sleep as soon as there is no work."""
    producer, attendant = attended
    epoch = producer.next_epoch()
    cpu = sorted(os.sched_getaffinity(0))[-1]
    runtime = _native.RingRuntime(arena.address, arena.nbytes, epoch, [cpu], 0, 1)
    try:
        producer.set_live_epoch(epoch)
        ring = ring_of(arena)
        ring.set_epoch(epoch)
        for step in range(1, 5):
            exchange(arena, ring, step)
        assert attendant.pages() == 0
        assert int(RingView(arena).stats["records"].sum()) == 4 * LAYERS
    finally:
        runtime.stop()


def test_the_attendant_takes_over_in_the_middle_of_a_step(arena, attended):
    """The worker's epoch ends between the post and the answer."""
    producer, attendant = attended
    epoch = producer.next_epoch()
    producer.set_live_epoch(epoch)  # considered alive, but serves nothing
    ring = ring_of(arena)
    ring.set_epoch(epoch)
    ring.begin_step(1)
    q, pages, n_pages = request(7)
    ring.post(1, q, pages, n_pages)
    settle()
    assert attendant.pages() == 0
    producer.set_live_epoch(0)
    out, lse = state(1)
    ring.merge(1, out, lse)
    assert ring.errors() == []
    assert attendant.pages() == int((pages >= 0).sum())


def test_the_attendant_refuses_a_record_that_makes_no_sense(arena, attended):
    producer, attendant = attended
    epoch = producer.next_epoch()
    producer.set_live_epoch(epoch)
    ring = ring_of(arena)
    ring.set_epoch(epoch)
    ring.begin_step(1)
    q, pages, n_pages = request(7)
    pages[0, 0] = 20  # there are 20 pages
    ring.post(1, q, pages, n_pages)
    settle()
    producer.set_live_epoch(0)
    ring.merge(1, *state(1))
    assert ring.errors() == ["CPU attention refused a record"]
    assert attendant.pages() == 0


def test_a_damaged_head_shows_no_record_that_is_being_written(arena, attended):
    """It appears to cover the next post's record, whose batch differs from that of the slot's previous one."""
    producer, _ = attended
    ring = ring_of(arena)
    ring.set_epoch(producer.next_epoch())
    for step in range(1, 13):
        rows = 1 + 2 * (step // 2 % 2)
        asked, (out, lse) = request(step, rows), state(step, rows)
        ring.begin_step(step)
        settle()
        RingView(arena).control["head"] |= 1 << 38
        ring.post(1, *asked)
        merged = ring.merge(1, out, lse)
        expected, _ = expected_of(arena, 1, asked, out, lse)
        assert (merged.cpu() - expected).abs().max() < 1e-5, f"step {step}"
    assert ring.errors() == []
