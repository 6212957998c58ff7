"""int8 copies of pages: the worker's answers are those of the int8 op over the pages as they are now,
bit by bit, whoever computes them and whatever was computed before."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from sglang_scout.core.errors import ArenaError
from sglang_scout.ops.attend import attend_reference
from sglang_scout.ops.attend_int8 import attend_pages_int8, error_bound, rounding_bound
from sglang_scout.ops.quantize import quantize_pages, room_for
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.ring import layout_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY_PAGE = np.arange(40)
NONE, WRITING, READY = range(3)


def planes(arena, layer):
    """K and V [P, S, H, D] of the model's dtype."""
    return [
        torch.from_numpy(plane.copy()).view(DTYPES[arena.spec.kv_dtype])
        for plane in (arena.k_pages(layer), arena.v_pages(layer))
    ]


def int8_pages(arena, layer):
    """Codes and scales of all pages as they are now, and the size of a page, as `attend_pages_int8`
    takes them."""
    s, (k, v) = arena.spec, planes(arena, layer)
    codes, scales = room_for(s.num_pages, s.page_size, s.num_kv_heads, s.head_dim)
    every = torch.arange(s.num_pages)
    quantize_pages(k, v, every, codes, scales, every, impl="native")
    return codes, scales, s.page_size


def listed(request):
    """The request's pages with -1 behind the count of each row."""
    _, pages, counts = request
    return torch.from_numpy(np.where(np.arange(pages.shape[1]) < counts[:, None], pages, -1))


def by_op(arena, layer, request):
    """out and lse over int8 pages, in one part."""
    s = arena.spec
    q = torch.from_numpy(request[0])
    pool = int8_pages(arena, layer)
    answer = attend_pages_int8(
        q, *pool, listed(request), None, None, s.scale, s.logit_cap, impl="native"
    )
    return [x.numpy() for x in answer]


def ask(client, arena, layer, step, request):
    s = arena.spec
    rows = len(request[0])
    out = np.full((rows, s.num_q_heads, s.head_dim), np.nan, np.float32)
    lse = np.full((rows, s.num_q_heads), np.nan, np.float32)
    reply = client.wait(client.post(layer, step, *request), out, lse)
    return (out, lse), reply


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def make_int8_arena(make_arena):
    return lambda **changes: make_arena(**({"kv_dtype": "bfloat16", "cpu_pages": "int8"} | changes))


def refill(arena, pages, rng):
    for layer in range(arena.spec.num_layers):
        for plane in (arena.k_pages(layer), arena.v_pages(layer)):
            fresh = rng.standard_normal(plane[pages].shape, np.float32)
            plane[pages] = (fresh.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_the_worker_answers_as_the_op_does_and_reads_a_page_once(
    make_int8_arena, make_request, cpu, until, kv_dtype
):
    arena = make_int8_arena(kv_dtype=kv_dtype, logit_cap=5.0 if kv_dtype == "float16" else 0.0)
    s = arena.spec
    used = set()
    with WorkerClient(arena, [cpu]) as client:
        client.set_final(EVERY_PAGE, True)
        for step in range(8):
            for layer in range(s.num_layers):
                request = make_request(s, 1 + step % 4, 10 * step + layer)
                got, reply = ask(client, arena, layer, step, request)
                assert reply.fallback_pages == 0
                assert_same(got, by_op(arena, layer, request))
                pages = listed(request)
                used |= {(layer, page) for page in pages[pages >= 0].tolist()}

                # What int8 costs against the pages themselves is within the op's bound.
                q = torch.from_numpy(request[0])
                pool = int8_pages(arena, layer)
                plain = attend_reference(
                    q, *planes(arena, layer), pages, None, None, s.scale, s.logit_cap
                )
                scales = pool[1], pages, None, s.scale
                bound = error_bound(q, *scales)[0] + rounding_bound(q, *scales, s.page_size)[0]
                error = (torch.from_numpy(got[0]) - plain[0]).abs()
                assert (error <= bound[..., None] + 1e-5).all()
        until(lambda: client.snapshot().quantized_pages == len(used), "each page quantised once")
        words = arena.ring().copy_words
        assert ((words & 3 == READY).sum(), (words != 0).sum()) == (len(used), len(used))


def test_pages_of_which_nothing_was_said_are_right_and_never_kept(
    make_int8_arena, make_request, cpu
):
    arena = make_int8_arena()
    rng = np.random.default_rng(3)
    request = make_request(arena.spec, 4, 1, full=True)
    with WorkerClient(arena, [cpu]) as client:
        for step in range(4):
            refill(arena, EVERY_PAGE, rng)
            got, reply = ask(client, arena, 0, step, request)
            assert reply.fallback_pages == 0
            assert_same(got, by_op(arena, 0, request))
    assert not arena.ring().copy_words.any() and not arena.ring().page_words.any()


@pytest.mark.parametrize("parts", [1, 3])
def test_pages_given_to_others_show_their_new_content(make_int8_arena, make_request, cpu, parts):
    arena = make_int8_arena()
    rng = np.random.default_rng(4)
    config = WorkerConfig(threads_per_group=parts)
    with WorkerClient(arena, [cpu], config=config) as client:
        client.set_final(EVERY_PAGE, True)
        for step in range(30):
            reused = rng.permutation(EVERY_PAGE)[:9]
            client.set_final(reused, False)
            refill(arena, reused, rng)
            client.set_final(reused, True)
            for layer in range(arena.spec.num_layers):
                request = make_request(arena.spec, 4, step)
                got, reply = ask(client, arena, layer, step, request)
                assert reply.fallback_pages == 0
                for a, b in zip(got, by_op(arena, layer, request), strict=True):
                    # Parts are merged: another order of sums.
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=0 if parts == 1 else 1e-5)


def test_rows_share_pages(make_int8_arena, make_ring, make_request):
    """Threads meet at the same pages at once; nobody waits for another, and all see the same codes."""
    arena = make_int8_arena()
    ring = make_ring(arena, threads=4)
    ring.live()
    q, pages, n_pages = make_request(arena.spec, 4, 1, full=True)
    rng = np.random.default_rng(5)
    pages[:] = pages[0]
    for step in range(200):
        ring.producer.set_final(EVERY_PAGE.ctypes.data, 40, False)
        refill(arena, pages[0], rng)
        ring.producer.set_final(EVERY_PAGE.ctypes.data, 40, True)
        request = q, pages, n_pages
        out, lse, fallback = ring.wait(ring.post(0, step, *request), 0, step, 4)
        assert fallback == 0
        assert_same((out, lse), by_op(arena, 0, request))


@pytest.mark.parametrize("parts", [1, 4])
def test_the_caller_computes_bitwise_the_same(make_int8_arena, make_ring, make_request, parts):
    """With the worker's copies, with its own, and without any."""
    arena = make_int8_arena()
    ring = make_ring(arena, threads=2, parts=parts)
    request = make_request(arena.spec, 4, 1)
    every = EVERY_PAGE.ctypes.data, 40
    answers = []

    def answer(layer, step):
        answers.append(ring.wait(ring.post(layer, step, *request), layer, step, 4))
        return answers[-1][2]

    assert answer(1, 0) > 0  # nothing is final
    ring.producer.set_final(*every, True)
    assert answer(1, 0) > 0
    copied = arena.ring().copy_words[1].copy()
    assert (copied & 3 == READY).sum() > 8
    ring.live()
    assert answer(1, 1) == 0  # the worker reads the caller's copies
    ring.producer.set_final(*every, False)
    assert answer(1, 2) == 0
    ring.producer.set_final(*every, True)
    assert answer(1, 3) == 0
    assert (arena.ring().copy_words[1] != copied).sum() == (copied & 3 == READY).sum()
    ring.die()
    assert answer(1, 4) > 0  # the caller reads the worker's copies
    for out, lse, _ in answers[1:]:
        assert_same((out, lse), answers[0][:2])


def test_a_killed_worker_s_copies_serve_the_caller_and_the_next_worker(
    make_int8_arena, make_request, cpu, until
):
    arena = make_int8_arena()
    request = make_request(arena.spec, 4, 1, full=True)
    expected = by_op(arena, 0, request)
    with WorkerClient(arena, [cpu]) as client:
        client.set_final(EVERY_PAGE, True)
        assert_same(ask(client, arena, 0, 0, request)[0], expected)
        until(lambda: client.snapshot().quantized_pages > 0, "the worker has counted")
        quantized = client.snapshot().quantized_pages
        os.kill(client.snapshot().pid, signal.SIGKILL)
        until(lambda: not client.ready, "the death is noticed")
        by_fallback = 0
        step = 1
        while not by_fallback or not client.ready:
            got, reply = ask(client, arena, 0, step, request)
            assert_same(got, expected)
            by_fallback += reply.fallback_pages
            step += 1
        got, reply = ask(client, arena, 0, step, request)
        assert_same(got, expected)
        assert client.snapshot().restarts == 1
        assert client.snapshot().quantized_pages == quantized


def test_who_may_take_a_claim_over(make_int8_arena, make_ring, make_request):
    """That of a dead life yes; that of a thread of this life, or of the caller, no."""
    arena = make_int8_arena()
    ring = make_ring(arena)
    words = arena.ring().copy_words
    request = make_request(arena.spec, 4, 1, full=True)
    pages = np.unique(request[1])
    ring.producer.set_final(EVERY_PAGE.ctypes.data, 40, True)
    generation = 1 << 26
    ring.live()
    epoch = ring.live()
    assert epoch == 2
    expected = by_op(arena, 0, request)
    for step, (holder, stays) in enumerate([(epoch, True), (0, True), (epoch - 1, False)]):
        claim = generation | holder << 2 | WRITING
        words[0] = claim
        out, lse, fallback = ring.wait(ring.post(0, step, *request), 0, step, 4)
        assert fallback == 0
        assert_same((out, lse), expected)
        ready = generation | epoch << 2 | READY
        assert (words[0, pages] == (claim if stays else ready)).all()
    ring.die()
    for step, (holder, stays) in enumerate([(epoch, True), (0, False)], 3):
        claim = generation | holder << 2 | WRITING
        words[0] = claim
        out, lse, fallback = ring.wait(ring.post(0, step, *request), 0, step, 4)
        assert fallback > 0
        assert_same((out, lse), expected)
        assert (words[0, pages] == (claim if stays else generation | READY)).all()


def test_generations_wrap(make_int8_arena, make_ring, make_request):
    """38 bits of them are kept with a copy."""
    arena = make_int8_arena()
    ring = make_ring(arena)
    ring.live()
    arena.ring().page_words[:] = (1 << 38) - 3
    rng = np.random.default_rng(6)
    request = make_request(arena.spec, 4, 1, full=True)
    for step in range(6):
        ring.producer.set_final(EVERY_PAGE.ctypes.data, 40, False)
        refill(arena, EVERY_PAGE, rng)
        ring.producer.set_final(EVERY_PAGE.ctypes.data, 40, True)
        for turn in (0, 2):
            at = 4 * step + turn
            out, lse, _ = ring.wait(ring.post(0, at, *request), 0, at, 4)
            assert_same((out, lse), by_op(arena, 0, request))
    assert (arena.ring().copy_words[0, request[1]] & 3 == READY).all()


def test_words_take_no_change_twice_and_only_of_pages_that_are_there(make_int8_arena, cpu):
    arena = make_int8_arena()
    client = WorkerClient(arena, [cpu])
    words = arena.ring().page_words
    for final, expected in ((False, 0), (True, 1), (True, 1), (False, 2), (False, 2)):
        client.set_final(np.array([3, 5]), final)
        assert (words[[3, 5]] == expected).all() and words.sum() == 2 * expected
    for wrong in (40, -1):
        with pytest.raises(ValueError, match=rf"page {wrong} is outside 0\.\.39"):
            client.set_final(np.array([0, wrong]), True)
        assert words[0] == 0
    with pytest.raises(ValueError, match="set_final: pages is int32"):
        client.set_final(np.array([1], np.int32), True)


def test_without_copies_there_is_nothing_of_them(make_arena, make_spec, make_request, cpu):
    """No memory is taken for them, and nothing lies elsewhere than with them."""
    spec = make_spec(num_pages=5000)
    plain, int8 = layout_of(spec), layout_of(make_spec(num_pages=5000, cpu_pages="int8"))
    offsets = [n for n in plain._fields if n.startswith(("page_words", "cop"))]
    assert len(offsets) == 5 and not any(getattr(plain, n) for n in offsets)
    same = set(plain._fields) - {*offsets, "total_bytes"}
    assert all(getattr(plain, n) == getattr(int8, n) for n in same)
    kv_end = plain.kv_offset + spec.num_layers * plain.layer_stride
    assert plain.total_bytes - kv_end < 2 << 20
    arena = make_arena()
    client = WorkerClient(arena, [cpu])
    client.set_final(EVERY_PAGE, True)
    assert client.snapshot().quantized_pages == 0 and not hasattr(arena.ring(), "page_words")


def test_memory_of_copies_is_taken_when_they_are_made(make_int8_arena, make_request, cpu):
    arena = make_int8_arena(num_pages=4000, num_layers=4, page_size=32, head_dim=64)
    before = os.fstat(arena.fd).st_blocks * 512
    assert before < arena.spec.kv_bytes + (8 << 20), "as much as the pages and the ring"
    with WorkerClient(arena, [cpu]) as client:
        client.set_final(np.arange(4000), True)
        request = make_request(arena.spec, 4, 1, full=True)
        ask(client, arena, 0, 0, request)
    taken = os.fstat(arena.fd).st_blocks * 512 - before
    assert 32 * 8192 < taken
    if arena.backing == "4k":
        assert taken < arena.spec.copies_bytes / 4


def test_an_unknown_kind_is_named(make_spec):
    with pytest.raises(ArenaError, match="cpu_pages='int4'; supported are model, int8"):
        make_spec(cpu_pages="int4")
