"""Attention in C++: refused arguments, arithmetic in every instruction set, threading."""

import math
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

from attend_cases import FP8, densely, i32, inputs
from implementations import implementations
from sglang_scout import _native
from sglang_scout.ops.attend import _attend_pages_native, attend_pages
from sglang_scout.worker.ring import Split


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pages", 7, r"pages has 7, expected values in \[0, 7\)"),
        ("pages", 2**31 - 1, "pages has 2147483647"),
        ("last_page", 7, "last_page=7"),
        ("last_len", 0, "last_len=0"),
        ("last_len", 9, "last_len=9"),
        ("last_len", None, "attend_batch: last_page and last_len must be given together"),
        ("pages", i32([[1]] * 9), "expected 1 or H page lists per request"),
    ],
)
def test_native_refuses_what_would_read_outside(name, value, message):
    names = ("q", "k", "v", "pages", "last_page", "last_len")
    arguments = dict(zip(names, inputs(1), strict=True))
    arguments["last_page"][0] = 0
    if isinstance(value, int):
        arguments[name].view(-1)[0] = value
    else:
        arguments[name] = value
    with pytest.raises(ValueError, match=message):
        _attend_pages_native(**arguments, scale=1.0)


@pytest.mark.usefixtures("isa")
def test_more_heads_than_one_pass_holds(agree):
    q, k, v, pages, *last = inputs(11, 1, 3, 16, 40, 8, 128, 3, torch.bfloat16)
    got = _attend_pages_native(q, k, v, pages, *last, 0.1)
    agree(attend_pages, got, densely(q, k, v, pages, *last, 0.1), torch.bfloat16)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8])
def test_every_narrow_value_is_widened_exactly(dtype):
    """With one token the result is V itself, in order, for all finite bit patterns, and lse is a sum of K."""
    words = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(words).view(dtype).float()
    v = torch.where(patterns.isfinite(), patterns, 0.0).reshape(1, 1, 512, 128).to(dtype)
    q, k = torch.ones(1, 512, 128), torch.zeros_like(v)
    out, lse = _attend_pages_native(q, k, v, i32([[0]]), None, None, 1.0)
    assert torch.equal(out.reshape(v.shape), v.float())
    assert (lse == 0).all()
    if dtype in FP8:
        q = torch.eye(128).expand(512, 128, 128).reshape(1, 512 * 128, 128).contiguous()
        _, lse = _attend_pages_native(q, v, k, i32([[0]]), None, None, 1.0)
        torch.testing.assert_close(lse.reshape(v.shape), v.float(), rtol=1e-6, atol=0)


@implementations(attend_pages, only=("native", "triton"))
@pytest.mark.usefixtures("isa")
def test_the_nan_of_e4m3_counts_as_480(impl):
    v = torch.full((1, 1, 1, 64), torch.nan).to(torch.float8_e4m3fn)
    k, q = torch.zeros_like(v), torch.ones(1, 1, 64)
    assert (impl(q, k, v, i32([[0]]), None, None, 1.0)[0] == 480).all()


@pytest.mark.usefixtures("isa")
def test_a_query_is_not_rounded_to_the_dtype_of_the_pages():
    k, q = torch.ones(1, 1, 1, 64).bfloat16(), torch.ones(1, 2, 64)
    q[0, 1] += 2.0**-12
    _, lse = _attend_pages_native(q, k, k, i32([[0]]), None, None, 1.0)
    assert lse.tolist() == [[64.0, 64.0 + 64 * 2.0**-12]]


@pytest.mark.usefixtures("isa")
def test_products_beyond_float32_stay_finite_and_a_nan_is_not_hidden():
    k = torch.full((2, 16, 1, 64), 3e38)
    k[1] *= -1
    v, q = torch.randn(2, 16, 1, 64), torch.full((1, 2, 64), 3e38)
    q[0, 1] *= -1
    out, lse = _attend_pages_native(q, k, v, i32([[0, 1]]), None, None, 0.125)
    assert lse.isfinite().all()
    torch.testing.assert_close(out[0], v[:, :, 0].mean(1))
    k[1, 5, 0, 7] = math.nan
    out, lse = _attend_pages_native(q, k, v, i32([[1, 0]]), None, None, 0.125)
    assert out.isnan().all() and lse.isnan().all()


# Threads -----------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """threads(n): sets the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_row_depends_neither_on_threads_nor_on_neighbours(threads):
    """Also with concurrent calls from several threads, each using several threads."""
    k, v = torch.randn(2, 16, 32, 2, 128).bfloat16()
    q, pages = torch.randn(12, 10, 128), torch.stack([torch.randperm(16)[:7] for _ in range(12)])
    pages = pages.int()

    def attend(rows):
        return _attend_pages_native(q[rows], k, v, pages[rows], None, None, 0.1)

    single = [attend(slice(b, b + 1)) for b in range(12)]
    expected = [torch.cat(parts) for parts in zip(*single, strict=True)]
    wrong = []

    def call(times):
        for _ in range(times):
            wrong.extend(
                g for g, e in zip(attend(slice(None)), expected, strict=True) if not g.equal(e)
            )

    for count in (1, 2, 5):
        threads(count)
        call(1)
    callers = [threading.Thread(target=call, args=(20,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("rows", "count"), [(1, 2), (1, 3), (2, 8), (3, 2), (3, 8)])
def test_threads_share_a_sequence(agree, threads, dtype, per_head, rows, count):
    """Few sequences of many large pages, with gaps in the lists and partial pages after them."""
    q, k, v, _, _, _ = inputs(rows, rows, 12, 32, 8, 2, 128, 1, dtype)
    lists = 8 if per_head else 1
    pages = torch.randint(0, 12, (rows * lists, 40 * lists), dtype=torch.int32)
    pages[0, :9] = pages[0, 20:25] = -1
    if rows > 1:
        pages[lists : 2 * lists] = -1  # only the partial page
    arguments = q, k, v, pages, i32([3, 4, -1][:rows]), i32([5, 32, 0][:rows]), 0.1
    threads(1)
    alone = _attend_pages_native(*arguments)
    threads(count)
    shared, again = (_attend_pages_native(*arguments) for _ in range(2))
    agree(attend_pages, shared, densely(*arguments), dtype)
    assert all(torch.equal(a, b) for a, b in zip(shared, again, strict=True))
    pages_of = (pages >= 0).sum(1)
    split = Split(count, 16, min_pages=lists * (4 if dtype == torch.bfloat16 else 2))
    batch = int((pages_of > 0).sum()), int(pages_of.sum()), int(pages_of.max())
    runs = _native.splits_of(*split, *batch)
    assert torch.equal(shared[0], alone[0]) == (runs == 1)  # split: sums in another order


def test_a_nan_in_one_run_is_not_lost(threads):
    threads(4)
    k = torch.zeros(8, 32, 8, 128)
    k[5, 3, 2, 7] = math.nan
    q, pages = torch.ones(1, 8, 128), torch.arange(8, dtype=torch.int32)[None]
    out, lse = _attend_pages_native(q, k, k.nan_to_num(), pages, None, None, 1.0)
    assert out[0, 2].isnan().all() and lse[0, 2].isnan()
    assert not out[0, :2].isnan().any() and not lse[0, 3:].isnan().any()


def test_the_thread_pool_survives_a_fork(threads):
    def attend():
        kv, pages = torch.ones(4, 16, 1, 64), torch.arange(16).int().view(4, 4) % 4
        out, _ = _attend_pages_native(torch.ones(4, 2, 64), kv, kv, pages, None, None, 1.0)
        assert (out == 1).all()

    threads(3)
    attend()
    child = multiprocessing.get_context("fork").Process(target=attend, daemon=True)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    attend()


def test_the_best_instruction_set_is_the_default():
    code = "from sglang_scout import _native as n; print(n.isa(), n.best_isa())"

    def shown(value):
        env = {k: x for k, x in os.environ.items() if k != "SCOUT_ISA"} | value
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr

    best = _native.best_isa()
    assert shown({}) == ([best, best], "")
    assert shown({"SCOUT_ISA": "avx2"}) == (["avx2", best], "")
    used, said = shown({"SCOUT_ISA": "sse9"})
    assert used == [best, best] and "SCOUT_ISA=sse9 is unknown" in said
    with pytest.raises(ValueError, match="sse9"):
        _native.set_isa("sse9")
