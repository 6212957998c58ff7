"""The ring from kernels, against the C++ producer, worker threads and attendant on a real arena. The attendant answers
records posted by kernels that no worker will answer, and wakes the threads of a worker, which a kernel cannot.

On a machine with a CUDA device the arena is registered with it and the kernels run there.
"""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import ring_cases
from ring_cases import (
    DEVICE,
    KINDS,
    LAYERS,
    exchange,
    request,
    ring_of,
    settle,
    shared_bytes,
    state,
)
from ring_view import RingView
from sglang_scout import _native
from sglang_scout.ops.triton.doorbell import splits_of
from sglang_scout.worker.ring import Split

SPLIT = Split(
    threads=6, max_splits=3, min_pages=2
)  # gives requests here different numbers of splits

pytestmark = ring_cases.NEEDS_KERNELS


@pytest.fixture
def arena(request):
    """With one NUMA node and one list per request unless parametrised."""
    with ring_cases.arena_of(*getattr(request, "param", ())) as made:
        yield made


@pytest.fixture
def attended(arena):
    """A producer, which provides the live epoch, and an attendant on its ring."""
    producer = _native.RingProducer(arena.address, arena.nbytes)
    attendant = _native.RingAttendant(producer, 50)
    yield producer, attendant
    settle()
    attendant.stop()


@KINDS
def test_leaves_the_bytes_that_the_cpp_producer_leaves(arena):
    """Except the bell, which is the producer's futex."""
    lists = arena.spec.lists
    requests = [
        (0, 7, request(1, lists=lists)),
        (2, 7, request(2, 4, 3, lists)),
        (0, 8, request(3, 1, lists=lists)),
        (1, 9, request(4, lists=lists)),
    ]
    producer = _native.RingProducer(arena.address, arena.nbytes)
    producer.set_split(*SPLIT)
    epoch = producer.next_epoch()
    producer.set_live_epoch(epoch)
    for layer, step, request_ in requests:
        q, pages, n = (t.cpu() for t in request_)
        # a kernel does not write rows without pages
        rows = q.view(len(n), -1).masked_fill(n[:, None] == 0, 0.0)
        q, pages, n = (t.numpy() for t in (rows.view(q.shape), pages, n))
        producer.post(layer, step, q, pages, n, 0)
    ring = RingView(arena)
    assert int(ring.bell["count"]) == len(requests)
    expected = [part.copy() for part in shared_bytes(arena)]
    ring.control["head"] = 0
    for part in shared_bytes(arena)[1:]:
        part[:] = 0

    device = ring_of(arena, epoch, split=SPLIT)
    for layer, step, (q, pages, n) in requests:
        device.begin_step(step)
        device.post(layer, q, pages, n)
    for got, want in zip(shared_bytes(arena), expected, strict=True):
        assert np.array_equal(got, want)
    assert len({int(ring.record(slot)["splits"]) for slot in (0, 3, 4, 5)}) > 1
    assert device.state.tolist() == [epoch, 9, len(requests), 0]
    assert device.errors() == []


@triton.jit
def rule_kernel(cases, out):
    at = cases + 6 * tl.program_id(0)
    sequences, total, largest = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    threads, most, min_pages = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    splits = splits_of(sequences, total, largest, threads, most, min_pages)
    tl.store(out + tl.program_id(0), splits)


def test_the_rule_for_runs_in_a_kernel():
    rng = np.random.default_rng(1)
    cases, expected = [], []
    for _ in range(150):
        split = Split(*(int(rng.integers(1, most + 1)) for most in (64, 16, 12)))
        counts = rng.integers(1, int(rng.choice([4, 64, 4096])), int(rng.choice([1, 5, 40, 600])))
        counts[0] = counts[0] * rng.integers(1, 8)
        batch = len(counts), int(counts.sum()), int(counts.max())
        cases.append([*batch, *split])
        expected.append(_native.splits_of(*split, *batch))
    out = torch.zeros(len(cases), dtype=torch.int32, device=DEVICE)
    rule_kernel[(len(cases),)](torch.tensor(cases, dtype=torch.int32, device=DEVICE), out)
    assert out.tolist() == expected and len(set(expected)) == 16


@KINDS
@pytest.mark.parametrize("split", [Split(), SPLIT])
@pytest.mark.parametrize("has_worker", [True, False])
def test_answers_are_merged(arena, attended, split, has_worker):
    """Of threads that sleep as soon as there is no work; without a worker, as after its death, the attendant's."""
    producer, attendant = attended
    epoch, cpu = producer.next_epoch(), sorted(os.sched_getaffinity(0))[-1]
    threads = None
    if has_worker:
        threads = _native.RingRuntime(
            arena.address, arena.nbytes, epoch, [cpu], 0, split.max_splits
        )
        producer.set_live_epoch(epoch)
    try:
        ring = ring_of(arena, epoch, split=split)
        posted = sum(exchange(arena, ring, step) for step in range(1, 4))  # slots are reused
        assert ring.state[2] == 3 * LAYERS
        assert attendant.pages() == (0 if has_worker else posted)
    finally:
        if threads is not None:
            threads.stop()


def test_nothing_is_posted_without_pages_or_without_an_epoch(arena):
    ring = ring_of(arena, step=1, timeout_us=1)
    before = [part.copy() for part in shared_bytes(arena)]
    out, lse = state(0)
    q, pages, n_pages = request(0)
    ring.post(0, q, pages, n_pages)  # epoch 0: warm-up and capture
    assert torch.equal(ring.merge(0, None, out, (out, lse)), out)
    ring.set_epoch(1)
    ring.post(1, q, torch.full_like(pages, -1), torch.zeros_like(n_pages))
    assert torch.equal(ring.merge(1, None, out, (out, lse)), out)
    assert all(map(np.array_equal, before, shared_bytes(arena)))
    assert ring.errors() == []


def test_no_answer_is_an_error_once_and_never_hangs(arena):
    """Without a worker; then the slots are busy until a new epoch begins."""
    ring, (out, lse) = ring_of(arena, 1, 1, timeout_us=2000), state(0)
    for layer in range(LAYERS):
        ring.post(layer, *request(layer))
    assert torch.equal(ring.merge(0, None, out, (out, lse)), out)
    settle()
    assert ring.faults() == ["no answer in time"]
    ring.timeout_us = 10**15  # after an error nothing is waited for
    for layer in range(1, LAYERS):
        ring.merge(layer, None, out, (out, lse))
    settle()
    assert ring.errors() == ["no answer in time"] and ring.faults() == []
    ring.begin_step(3)
    ring.post(0, *request(1))
    ring.merge(0, None, out, (out, lse))  # returns at once: nothing was posted
    settle()
    assert ring.faults() == ring.errors() == ["a slot was not answered"]
    head = RingView(arena).control
    assert int(head["head"]) == LAYERS
    ring.set_epoch(2)
    ring.post(0, *request(1))
    assert ring.errors() == []
    assert int(head["head"]) == LAYERS + 1


@pytest.mark.parametrize("status", [0, 1])
def test_only_a_good_answer_to_this_very_record_counts(arena, status):
    ring = ring_of(arena, 4, 2, timeout_us=2000)
    q, pages, n_pages = request(0)
    ring.post(1, q, pages, n_pages)
    settle()
    view = RingView(arena)
    slot = view.slot(1, 2)
    reply = view.reply(slot)
    out_there, lse_there = view.reply_data(slot)
    out_there[:], lse_there[:] = 1.0, 100.0
    reply["done"] = (3 << 40) | 1  # of an earlier epoch
    out, lse = state(0)
    ring.merge(1, None, out, (out, lse))
    assert ring.errors() == ["no answer in time"]
    ring.set_epoch(4)
    ring.post(1, q, pages, n_pages)
    settle()
    reply["status"], reply["done"] = status, int(view.record(slot)["seq"])
    merged = ring.merge(1, None, out, (out, lse))
    assert ring.errors() == (["CPU attention refused a record"] if status else [])
    assert torch.equal(merged, out if status else torch.ones_like(out))
    ring.begin_step(4)
    ring.post(1, q, pages, n_pages)  # answered, also if refused: the slot is free again
    assert ring.errors() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": torch.zeros(3, 6).int()}, r"pages is \[3, 6\], the ring has room for \[4, 5\]"),
        ({"n_pages": torch.zeros(6).int()[::2]}, r"n_pages is \[3\] with strides \(2,\)"),
    ],
)
def test_malformed_arguments_are_named(arena, change, message):
    arguments = dict(zip(("query", "pages", "n_pages"), request(0), strict=True))
    with pytest.raises(ValueError, match=message):
        ring_of(arena).post(0, **arguments | change)


def test_ranks_see_each_other_s_faults(arena):
    """Those of a joint step; each rank clears only its own."""
    faults = torch.zeros(3, dtype=torch.int64, pin_memory=DEVICE != "cpu")
    rings = [ring_of(arena, 1, 1, 2000, faults=faults, rank=rank) for rank in range(3)]
    ring = rings[1]
    ring.post(0, *request(0))
    out, lse = state(0)
    ring.merge(0, None, out, (out, lse))
    settle()
    assert [r.faults() for r in rings] == [["no answer in time"]] * 3
    assert faults.tolist() == [0, 1, 0]
    assert rings[0].errors() == rings[2].errors() == []
    assert rings[2].faults() == ["no answer in time"]
    assert ring.errors() == ["no answer in time"]
    assert [r.faults() for r in rings] == [[]] * 3


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


@pytest.mark.parametrize("makes_sense", [True, False])
def test_the_attendant_takes_over_in_the_middle_of_a_step(arena, attended, makes_sense):
    """The worker's epoch ends between the post and the answer."""
    producer, attendant = attended
    epoch = producer.next_epoch()
    producer.set_live_epoch(epoch)  # considered alive, but serves nothing
    ring = ring_of(arena, epoch, 1)
    q, pages, n_pages = request(7)
    if not makes_sense:
        pages[0, 0] = 20  # there are 20 pages
    ring.post(1, q, pages, n_pages)
    settle()
    assert attendant.pages() == 0
    producer.set_live_epoch(0)
    out, lse = state(1)
    ring.merge(1, None, out, (out, lse))
    assert ring.errors() == ([] if makes_sense else ["CPU attention refused a record"])
    assert attendant.pages() == (int((pages >= 0).sum()) if makes_sense else 0)


def test_a_damaged_head_shows_no_record_that_is_being_written(arena, attended):
    """It appears to cover the next post's record, whose batch differs from that of the slot's previous one."""
    producer, _ = attended
    ring = ring_of(arena, producer.next_epoch())
    for step in range(1, 13):
        rows = 1 + 2 * (step // 2 % 2)
        asked, (out, lse) = request(step, rows), state(step, rows)
        ring.begin_step(step)
        settle()
        RingView(arena).control["head"] |= 1 << 38
        ring.post(1, *asked)
        merged = ring.merge(1, None, out, (out, lse))
        expected, _ = ring_cases.expected_of(arena, 1, asked, out, lse)
        assert (merged.cpu() - expected).abs().max() < 1e-5, f"step {step}"
    assert ring.errors() == []
