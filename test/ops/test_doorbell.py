"""The ring from kernels, against the C++ producer and the C++ worker threads on a real arena.

On a machine with a CUDA device the arena is registered with it and the kernels run there.
"""

import os

import numpy as np
import pytest
import torch

from sglang_scout.core.split import Split
from sglang_scout.ops import triton
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.merge import merge_states

triton_language = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

_native = pytest.importorskip("sglang_scout._native")
from ring_view import RingView  # noqa: E402
from sglang_scout.ops.doorbell import DeviceRing  # noqa: E402
from sglang_scout.ops.triton.doorbell import runs_of  # noqa: E402
from sglang_scout.worker.arena import Arena, ArenaSpec  # noqa: E402  (needs the native module)

LAYERS, BATCH, K, HQ, D = 3, 4, 5, 4, 16
SPLIT = Split(threads=6, most=3, least_pages=2)  # not all requests here in as many runs
LONG_US = 60_000_000  # a worker that sleeps could not be woken by a kernel

DEVICE = "cpu" if triton.interpreted() else "cuda"
MAPPED = 2  # cudaHostRegisterMapped

pytestmark = pytest.mark.skipif(
    not (triton.interpreted() or torch.cuda.is_available()),
    reason="no CUDA device, TRITON_INTERPRET is not set",
)


def settle():
    """What was launched has run."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


TWO_KINDS = pytest.mark.parametrize("arena", [1, 2], indirect=True, ids=["node", "nodes"])


@pytest.fixture
def arena(request):
    """Of one memory node, or of as many as the test asks for."""
    nodes = getattr(request, "param", 1)
    spec = ArenaSpec(LAYERS, 20, 4, 2, HQ, D, "float32", D**-0.5, BATCH, K, num_nodes=nodes)
    made = Arena.create(spec)
    rng = np.random.default_rng(3)
    for layer in range(LAYERS):
        for plane in (made.k_pages(layer), made.v_pages(layer)):
            plane[:] = rng.standard_normal(plane.shape, np.float32)
    if DEVICE == "cuda":
        assert int(torch.cuda.cudart().cudaHostRegister(made.address, made.nbytes, MAPPED)) == 0
    yield made
    if DEVICE == "cuda":
        torch.cuda.cudart().cudaHostUnregister(made.address)
    made.close()


@pytest.fixture
def worker(arena):
    """worker(epoch): threads that serve; they never sleep."""
    running = []

    def start(epoch, parts=1):
        cpu = sorted(os.sched_getaffinity(0))[-1]
        runtime = _native.RingRuntime(arena.address, arena.nbytes, epoch, [cpu], LONG_US, parts)
        running.append(runtime)

    yield start
    for runtime in running:
        runtime.stop()


def ring_of(arena, timeout_us=20_000_000, parts=1, **more):
    return DeviceRing(
        arena.address,
        arena.layout(),
        arena.spec,
        parts=parts,
        timeout_us=timeout_us,
        device=DEVICE,
        **more,
    )


def request(seed, rows=3, k=K):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, HQ, D, generator=rng)
    n_pages = torch.randint(0, k + 1, (rows,), generator=rng, dtype=torch.int32)
    n_pages[0] = k
    pages = torch.randint(0, 20, (rows, k), generator=rng, dtype=torch.int32)
    pages.masked_fill_(torch.arange(k) >= n_pages[:, None], -1)
    return q.to(DEVICE), pages.to(DEVICE), n_pages.to(DEVICE)


def state(seed, rows=3):
    rng = torch.Generator().manual_seed(1000 + seed)
    parts = torch.randn(rows, HQ, D, generator=rng), torch.randn(rows, HQ, generator=rng)
    return tuple(part.to(DEVICE) for part in parts)


def shared_bytes(arena):
    """Everything that a producer writes: control, log and records."""
    settle()
    at = arena.layout()
    memory = arena._mapped()
    return memory[at.control_offset : at.stats_offset], memory[at.log_offset : at.replies_offset]


@TWO_KINDS
@pytest.mark.parametrize("parts", [2, 0])
def test_leaves_the_bytes_that_the_cpp_producer_leaves(arena, parts):
    """But for the bell, which is the producer's futex."""
    requests = [
        (0, 7, request(1)),
        (2, 7, request(2, 4, 3)),
        (0, 8, request(3, 1)),
        (1, 9, request(4)),
    ]
    producer = _native.RingProducer(arena.address, arena.nbytes)
    producer.set_split(*SPLIT)
    epoch = producer.next_epoch()
    producer.set_live_epoch(epoch)
    for layer, step, request_ in requests:
        q, pages, n = (t.cpu() for t in request_)
        q = torch.where(
            (n > 0)[:, None, None], q, 0.0
        )  # a kernel leaves rows without pages as they are
        producer.post(
            layer, step, len(q), q.data_ptr(), pages.data_ptr(), pages.shape[1], n.data_ptr(),
            parts, q.nbytes,
        )  # fmt: skip
    ring = RingView(arena)
    assert int(ring.control["bell"]) == len(requests)
    ring.control["bell"] = 0
    expected = [part.copy() for part in shared_bytes(arena)]
    ring.control["head"] = 0
    shared_bytes(arena)[1][:] = 0

    device = ring_of(arena, parts=parts, split=SPLIT)
    device.set_epoch(epoch)
    for layer, step, (q, pages, n) in requests:
        device.begin_step(step)
        device.post(layer, q, pages, n)
    for got, want in zip(shared_bytes(arena), expected, strict=True):
        assert np.array_equal(got, want)
    runs = {int(ring.record(slot)["parts"]) for slot in (0, 3, 4, 5)}
    assert runs == {2} if parts else len(runs) > 1
    assert device.state.tolist() == [epoch, 9, len(requests), 0]
    assert device.errors() == []


@triton_language.jit
def rule_kernel(cases, out):
    at = cases + 6 * tl.program_id(0)
    sequences, total, largest = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    threads, most, least_pages = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    runs = runs_of(sequences, total, largest, threads, most, least_pages)
    tl.store(out + tl.program_id(0), runs)


def test_the_rule_for_runs_in_a_kernel():
    rng = np.random.default_rng(1)
    cases, expected = [], []
    for _ in range(150):
        split = Split(*(int(rng.integers(1, most + 1)) for most in (64, 16, 12)))
        counts = rng.integers(1, int(rng.choice([4, 64, 4096])), int(rng.choice([1, 5, 40, 600])))
        counts[0] = counts[0] * rng.integers(1, 8)
        batch = len(counts), int(counts.sum()), int(counts.max())
        cases.append([*batch, *split])
        expected.append(_native.split_runs(*split, *batch))
    out = torch.zeros(len(cases), dtype=torch.int32, device=DEVICE)
    rule_kernel[(len(cases),)](torch.tensor(cases, dtype=torch.int32, device=DEVICE), out)
    assert out.tolist() == expected and len(set(expected)) == 16


@TWO_KINDS
@pytest.mark.parametrize("parts", [1, 2])
def test_answers_of_worker_threads_are_merged(arena, worker, parts):
    worker(epoch=5, parts=parts)
    ring = ring_of(arena, parts=parts)
    ring.set_epoch(5)
    for step in range(1, 5):  # both parities, slots used again
        exchange(arena, ring, step)
    assert ring.state[2] == 4 * LAYERS


def test_nothing_is_posted_without_pages_or_without_a_life(arena):
    ring = ring_of(arena, timeout_us=1)
    before = [part.copy() for part in shared_bytes(arena)]
    out, lse = state(0)
    kept = out.clone(), lse.clone()
    q, pages, n_pages = request(0)
    ring.begin_step(1)
    ring.post(0, q, pages, n_pages)  # epoch 0: warm-up and capture
    ring.merge(0, out, lse)
    ring.set_epoch(1)
    ring.post(1, q, torch.full_like(pages, -1), torch.zeros_like(n_pages))
    ring.merge(1, out, lse)
    assert all(np.array_equal(a, b) for a, b in zip(before, shared_bytes(arena), strict=True))
    assert torch.equal(out, kept[0])
    assert torch.equal(lse, kept[1])
    assert ring.errors() == []


def test_no_answer_is_an_error_and_never_hangs(arena):
    """Nobody serves; then the slot is busy until a new life begins."""
    ring = ring_of(arena, timeout_us=2000)
    ring.set_epoch(1)
    ring.begin_step(1)
    ring.post(0, *request(0))
    out, lse = state(0)
    kept = out.clone()
    ring.merge(0, out, lse)
    assert torch.equal(out, kept)
    settle()
    assert ring.faults() == ring.errors() == ["no answer in time"]
    assert ring.faults() == []
    ring.begin_step(3)
    ring.post(0, *request(1))
    ring.merge(0, out, lse)  # returns at once: nothing was posted
    settle()
    assert ring.faults() == ring.errors() == ["a slot was not answered"]
    assert int(RingView(arena).control["head"]) == 1
    ring.set_epoch(2)
    ring.post(0, *request(1))
    assert ring.errors() == []
    assert int(RingView(arena).control["head"]) == 2


def test_after_an_error_nothing_is_waited_for(arena):
    """A step has many slots: with the whole time for each of them its server would end late."""
    ring = ring_of(arena, timeout_us=2000)
    ring.set_epoch(1)
    ring.begin_step(1)
    for layer in range(LAYERS):
        ring.post(layer, *request(layer))
    assert int(RingView(arena).control["head"]) == LAYERS
    out, lse = state(0)
    ring.merge(0, out, lse)
    settle()
    assert ring.faults() == ["no answer in time"]
    ring.timeout_us = 10**15
    for layer in range(1, LAYERS):
        ring.merge(layer, out, lse)
    settle()
    assert ring.errors() == ["no answer in time"]


@pytest.fixture
def attended(arena):
    """A producer, which says who lives, and an attendant on its ring."""
    producer = _native.RingProducer(arena.address, arena.nbytes)
    attendant = _native.RingAttendant(producer, 50)
    yield producer, attendant
    settle()
    attendant.stop()


def exchange(arena, ring, step):
    """Post every layer, merge every layer, compare with the reference. Returns the pages posted."""
    ring.begin_step(step)
    requests = [request(10 * step + layer) for layer in range(LAYERS)]
    for layer, (q, pages, n_pages) in enumerate(requests):
        ring.post(layer, q, pages, n_pages)
    for layer, (q, pages, _) in enumerate(requests):
        out, lse = state(layer)
        pool = (torch.from_numpy(x(layer)) for x in (arena.k_pages, arena.v_pages))
        answer = attend_pages.reference(q.cpu(), *pool, pages.cpu(), None, None, D**-0.5)
        expected = merge_states.reference(out.cpu(), lse.cpu(), *answer)
        ring.merge(layer, out, lse)
        assert torch.allclose(out.cpu(), expected[0], atol=1e-5)
        assert torch.allclose(lse.cpu(), expected[1], atol=1e-5)
    assert ring.errors() == []
    return sum(int((pages >= 0).sum()) for _, pages, _ in requests)


@TWO_KINDS
@pytest.mark.parametrize("parts", [1, 3])
def test_the_attendant_answers_what_no_worker_will(arena, attended, parts):
    """Records of a life that nobody leads, as after a worker's death."""
    producer, attendant = attended
    ring = ring_of(arena, parts=parts)
    ring.set_epoch(producer.next_epoch())
    posted = sum(exchange(arena, ring, step) for step in range(1, 4))
    assert attendant.pages() == posted


def test_the_attendant_leaves_a_living_worker_its_records(arena, attended):
    """And wakes its threads, which a kernel cannot: they sleep at once when there is no work."""
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
    """The worker's life ends between the post and the answer."""
    producer, attendant = attended
    epoch = producer.next_epoch()
    producer.set_live_epoch(epoch)  # alive as far as anybody knows, but it serves nothing
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
    assert ring.errors() == ["the worker refused a record"]
    assert attendant.pages() == 0


@pytest.mark.parametrize("status", [0, 1])
def test_only_a_good_answer_to_this_very_record_counts(arena, status):
    ring = ring_of(arena, timeout_us=2000)
    ring.set_epoch(4)
    ring.begin_step(2)
    q, pages, n_pages = request(0)
    ring.post(1, q, pages, n_pages)
    settle()
    view = RingView(arena)
    slot = view.slot(1, 2)
    reply = view.reply(slot)
    out_there, lse_there = view.reply_data(slot)
    out_there[:], lse_there[:] = 1.0, 100.0
    reply["done"] = (3 << 40) | 1  # of an earlier life
    out, lse = state(0)
    ring.merge(1, out, lse)
    assert ring.errors() == ["no answer in time"]
    ring.set_epoch(4)
    ring.post(1, q, pages, n_pages)
    settle()
    reply["status"], reply["done"] = status, int(view.record(slot)["seq"])
    ring.merge(1, out, lse)
    assert ring.errors() == (["the worker refused a record"] if status else [])
    assert bool((out == 1.0).all()) == (status == 0)
    ring.begin_step(4)
    ring.post(1, q, pages, n_pages)  # answered, also if refused: the slot is free again
    assert ring.errors() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, "post: layer is 3, expected 0..2"),
        (
            {"q": torch.zeros(3, HQ, 32)},
            r"post: q is torch.float32\[3, 4, 32\] .* expected torch.float32\[3, 4, 16\]",
        ),
        ({"pages": torch.zeros(3, 6).int()}, r"pages is \[3, 6\], the ring has room for \[4, 5\]"),
        ({"n_pages": torch.zeros(2).int()}, r"post: n_pages is torch.int32\[2\]"),
    ],
)
def test_malformed_arguments_are_named(arena, change, message):
    arguments = dict(zip(("q", "pages", "n_pages"), request(0), strict=True)) | {"layer": 0}
    with pytest.raises(ValueError, match=message):
        ring_of(arena).post(**(arguments | change))


def test_ranks_see_each_other_s_faults(arena):
    """Those of a step that ends together; each clears its own alone."""
    faults = torch.zeros(3, dtype=torch.int64, pin_memory=DEVICE != "cpu")
    with pytest.raises(ValueError, match="rank is 3, faults has 3 words"):
        ring_of(arena, faults=faults, rank=3)
    rings = [ring_of(arena, timeout_us=2000, faults=faults, rank=rank) for rank in range(3)]
    ring = rings[1]
    ring.set_epoch(1)
    ring.begin_step(1)
    ring.post(0, *request(0))
    ring.merge(0, *state(0))
    settle()
    assert [r.faults() for r in rings] == [["no answer in time"]] * 3
    assert faults.tolist() == [0, 1, 0]
    assert rings[0].errors() == rings[2].errors() == []
    assert rings[2].faults() == ["no answer in time"]
    assert ring.errors() == ["no answer in time"]
    assert [r.faults() for r in rings] == [[]] * 3
