"""The C++ kernels behind their raw-address API, against plain float64, on every instruction set."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_scout.core.split import Split

_native = pytest.importorskip("sglang_scout._native", reason="the native module is not built")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
REDUCTIONS = {"mass": 0, "max": 1, "sum": 2}
pytestmark = pytest.mark.usefixtures("isa")

# float32 sums of up to a few thousand products of unit normals.
TOLERANCE = 4e-6

examples = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def run_attend(q, k, v, pages, last_page=None, last_len=None, scale=None, logit_cap=0.0, threads=1):
    """attend_batch on tensors: q [B, HQ, D], k, v [P, S, H, D], pages [B, R] -> out, lse."""
    P, S, H, D = k.shape
    B, HQ, _ = q.shape
    out = torch.full((B, HQ, D), math.nan)
    lse = torch.full((B, HQ), math.nan)
    _native.attend_batch(
        q_ptr=q.data_ptr(),
        k_ptr=k.data_ptr(),
        v_ptr=v.data_ptr(),
        num_pages=P,
        S=S,
        H=H,
        D=D,
        dtype=DTYPES[k.dtype],
        G=HQ // H,
        scale=D**-0.5 if scale is None else scale,
        logit_cap=logit_cap,
        pages_ptr=pages.data_ptr(),
        B=B,
        R=pages.shape[1],
        last_page_ptr=0 if last_page is None else last_page.data_ptr(),
        last_len_ptr=0 if last_len is None else last_len.data_ptr(),
        out_ptr=out.data_ptr(),
        lse_ptr=lse.data_ptr(),
        threads=threads,
    )
    return out, lse


def plain_attend(q, k, v, pages, last_page=-1, last_len=0, scale=None, logit_cap=0.0):
    """One sequence in float64: q [HQ, D], pages a list -> out [HQ, D], lse [HQ]."""
    H, D = k.shape[2:]
    rows = [(p, k.shape[1]) for p in pages if p >= 0]
    rows += [(last_page, last_len)] if last_page >= 0 else []
    if not rows:
        return torch.zeros(q.shape, dtype=torch.float64), torch.full((len(q),), -math.inf).double()
    keys = torch.cat([k[p, :n] for p, n in rows]).double()
    values = torch.cat([v[p, :n] for p, n in rows]).double()
    s = torch.einsum("hgd,thd->hgt", q.double().view(H, -1, D), keys)
    s *= D**-0.5 if scale is None else scale
    if logit_cap:
        s = logit_cap * torch.tanh(s / logit_cap)
    out = torch.einsum("hgt,thd->hgd", torch.softmax(s, -1), values)
    return out.reshape(q.shape), torch.logsumexp(s, -1).reshape(-1)


def ids(rows):
    return torch.tensor(rows, dtype=torch.int32)


def assert_close(actual, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_best_instruction_set_is_the_default():
    code = "from sglang_scout import _native as n; print(n.isa(), n.best_isa())"

    def shown(value):
        env = {k: x for k, x in os.environ.items() if k != "SCOUT_ISA"} | value
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr

    best = _native.best_isa()
    assert shown({}) == ([best, best], "")
    assert shown({"SCOUT_ISA": "portable"}) == (["portable", best], "")
    used, said = shown({"SCOUT_ISA": "sse9"})
    assert used == [best, best] and "SCOUT_ISA=sse9 is unknown" in said


def test_unknown_instruction_set_is_refused(isa):
    with pytest.raises(ValueError, match="sse9"):
        _native.set_isa("sse9")
    assert _native.isa() == isa


@examples
@given(
    dtype=st.sampled_from(list(DTYPES)),
    D=st.sampled_from([16, 48, 64, 80, 96, 128, 256]),
    S=st.sampled_from([1, 3, 16, 32, 64, 100]),
    H=st.integers(1, 3),
    G=st.integers(1, 17),
    cap=st.sampled_from([0.0, 0.0, 4.0, 30.0]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_attend_matches_float64(dtype, D, S, H, G, cap, threads, seed):
    torch.manual_seed(seed)
    B, P, R = 2, 5, 4
    k, v = torch.randn(2, P, S, H, D).to(dtype)
    q = torch.randn(B, H * G, D)
    pages = torch.randint(-2, P - 1, (B, R), dtype=torch.int32)  # padding anywhere
    last_page = ids([P - 1, -1]) if seed % 2 else ids([-1, P - 1])
    last_len = torch.randint(1, S + 1, (B,), dtype=torch.int32)
    # What must not be read: pages nobody lists, and tokens of the last page that nobody wrote.
    unlisted = sorted(set(range(P - 1)) - set(pages.flatten().tolist()))
    k[unlisted] = v[unlisted] = math.nan
    valid = int(last_len[0 if seed % 2 else 1])
    k[P - 1, valid:] = v[P - 1, valid:] = math.nan

    out, lse = run_attend(q, k, v, pages, last_page, last_len, logit_cap=cap, threads=threads)

    for b in range(B):
        expected = plain_attend(
            q[b], k, v, pages[b].tolist(), int(last_page[b]), int(last_len[b]), logit_cap=cap
        )
        assert_close(out[b], expected[0])
        assert_close(lse[b], expected[1])


def test_attend_with_more_rows_than_one_pass_holds():
    k, v = torch.randn(2, 3, 16, 40, 128).to(torch.bfloat16)
    q = torch.randn(1, 40 * 8, 128)
    out, lse = run_attend(q, k, v, ids([[2, 0, 1]]))
    expected = plain_attend(q[0], k, v, [2, 0, 1])
    assert_close(out[0], expected[0])
    assert_close(lse[0], expected[1])


@pytest.mark.parametrize("R", [0, 3])
def test_empty_set_attends_to_nothing(R):
    k = torch.full((2, 16, 2, 64), math.nan)
    q = torch.randn(2, 4, 64)
    pages = torch.full((2, R), -1, dtype=torch.int32)
    out, lse = run_attend(q, k, k, pages)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_widened_exactly(dtype):
    """With one token the result is V itself, in order, for all finite bit patterns."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = torch.where(patterns.isfinite(), patterns, torch.zeros_like(patterns))
    v = patterns.reshape(1, 1, 512, 128).contiguous()
    k = torch.zeros_like(v)
    out, lse = run_attend(torch.ones(1, 512, 128), k, v, ids([[0]]))
    assert torch.equal(out.reshape(v.shape), v.float())
    assert torch.equal(lse, torch.zeros_like(lse))


def test_query_is_not_rounded_to_the_dtype_of_the_pages():
    """Queries that differ only beyond bf16's 8 bits give scores that differ accordingly."""
    k = torch.ones(1, 1, 1, 64).to(torch.bfloat16)
    q = torch.full((1, 2, 64), 1.0)
    q[0, 1] += 2.0**-12
    _, lse = run_attend(q, k, k, ids([[0]]), scale=1.0)
    assert lse[0, 0].item() == 64.0
    assert lse[0, 1].item() == 64.0 + 64 * 2.0**-12


def test_identical_keys_give_the_mean():
    k = torch.randn(1, 1, 2, 128).expand(4, 32, 2, 128).contiguous().to(torch.bfloat16)
    v = torch.randn(4, 32, 2, 128).to(torch.bfloat16)
    q = torch.randn(1, 10, 128)
    out, lse = run_attend(q, k, v, ids([[3, 1, 0, 2]]))
    mean = v.double().mean((0, 1)).repeat_interleave(5, 0)
    assert_close(out[0], mean)
    assert_close(lse[0], plain_attend(q[0], k, v, [0, 1, 2, 3])[1])


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e9, 1e18])
@pytest.mark.parametrize("rising", [True, False])
def test_huge_scores_select_the_largest(magnitude, rising):
    """exp would overflow or vanish; the maximum moves on every page, or is on the first one."""
    P, S, D = 5, 16, 64
    order = torch.arange(P * S, dtype=torch.float32) / (P * S)
    k = (order if rising else -order).view(P, S, 1, 1).expand(P, S, 1, D).contiguous()
    v = torch.randn(P, S, 1, D)
    q = torch.full((1, 3, D), magnitude)
    out, lse = run_attend(q, k, v, ids([list(range(P))]))
    expected = plain_attend(q[0], k, v, range(P))
    assert_close(out[0], expected[0], 1e-4)
    assert_close(lse[0], expected[1], 1e-4)


def test_overflowing_dot_products_stay_finite():
    k = torch.full((2, 16, 1, 64), 3e38)
    k[1] *= -1
    v = torch.randn(2, 16, 1, 64)
    q = torch.full((1, 2, 64), 3e38)
    q[0, 1] *= -1
    out, lse = run_attend(q, k, v, ids([[0, 1]]))
    assert out.isfinite().all() and lse.isfinite().all()
    assert_close(out[0, 0], v[0, :, 0].double().mean(0))
    assert_close(out[0, 1], v[1, :, 0].double().mean(0))


def test_nan_keys_are_not_hidden():
    k, v = torch.randn(2, 2, 32, 1, 64)
    k[1, 5, 0, 7] = math.nan
    out, lse = run_attend(torch.randn(1, 5, 64), k, v, ids([[1, 0]]))
    assert out.isnan().all() and lse.isnan().all()


def test_result_does_not_depend_on_threads_or_neighbours():
    k, v = torch.randn(2, 16, 32, 2, 128).to(torch.bfloat16)
    q = torch.randn(12, 10, 128)
    pages = torch.stack([torch.randperm(16)[:7] for _ in range(12)]).int()
    single = [run_attend(q[b : b + 1], k, v, pages[b : b + 1]) for b in range(12)]
    for threads in (1, 2, 5):
        out, lse = run_attend(q, k, v, pages, threads=threads)
        assert torch.equal(out, torch.cat([o for o, _ in single]))
        assert torch.equal(lse, torch.cat([x for _, x in single]))


def test_calls_from_several_threads_at_once():
    k, v = torch.randn(2, 8, 32, 2, 64).to(torch.bfloat16)
    q = torch.randn(6, 4, 64)
    pages = torch.stack([torch.randperm(8)[:5] for _ in range(6)]).int()
    expected, _ = run_attend(q, k, v, pages)
    wrong = []

    def call():
        for _ in range(20):
            out, _ = run_attend(q, k, v, pages, threads=2)
            if not torch.equal(out, expected):
                wrong.append(out)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "threads"), [(1, 2), (1, 3), (2, 8), (3, 2), (3, 8)])
def test_threads_share_a_sequence(dtype, rows, threads):
    """Few sequences of many large pages, with holes in the lists and partial pages behind them."""
    rng = torch.Generator().manual_seed(rows)
    k, v = (torch.randn(12, 32, 8, 128, generator=rng).bfloat16().to(dtype) for _ in range(2))
    q = torch.randn(rows, 16, 128, generator=rng)
    pages = torch.randint(0, 12, (rows, 40), generator=rng, dtype=torch.int32)
    pages[0, :9] = pages[0, 20:25] = -1
    if rows > 1:
        pages[1] = -1  # nothing but the partial page
    last_page = torch.tensor([3, 4, -1][:rows], dtype=torch.int32)
    last_len = torch.tensor([5, 32, 0][:rows], dtype=torch.int32)
    alone = run_attend(q, k, v, pages, last_page, last_len)
    shared = run_attend(q, k, v, pages, last_page, last_len, threads=threads)
    again = run_attend(q, k, v, pages, last_page, last_len, threads=threads)
    for b in range(rows):
        tail = (int(last_page[b]), int(last_len[b]))
        expected = plain_attend(q[b], k, v, pages[b].tolist(), *tail)
        for got, want in zip(shared, expected, strict=True):
            torch.testing.assert_close(got[b].double(), want, atol=TOLERANCE, rtol=TOLERANCE)
    assert all(torch.equal(a, b) for a, b in zip(shared, again, strict=True))
    counts = (pages >= 0).sum(1)
    runs = Split(threads, 16, least_pages=4 if dtype == torch.bfloat16 else 2).runs(
        int((counts > 0).sum()), int(counts.sum()), int(counts.max())
    )
    assert torch.equal(shared[0], alone[0]) == (runs == 1)  # split: sums in another order


def test_a_nan_in_one_run_is_not_lost():
    k = torch.zeros(8, 32, 8, 128)
    k[5, 3, 2, 7] = math.nan
    q, pages = torch.ones(1, 8, 128), torch.arange(8, dtype=torch.int32)[None]
    out, lse = run_attend(q, k, k.nan_to_num(), pages, threads=4)
    assert out[0, 2].isnan().all() and lse[0, 2].isnan()
    assert not out[0, :2].isnan().any() and not lse[0, 3:].isnan().any()


FORK = """
import os, signal
import numpy as np
from sglang_scout import _native

def attend():
    q = np.ones((4, 2, 64), np.float32)
    kv = np.ones((4, 16, 1, 64), np.float32)
    pages = np.arange(16, dtype=np.int32).reshape(4, 4) % 4
    out = np.full_like(q, np.nan)
    lse = np.full((4, 2), np.nan, np.float32)
    _native.attend_batch(q.ctypes.data, kv.ctypes.data, kv.ctypes.data, 4, 16, 1, 64, 0, 2, 1.0, 0.0,
                         pages.ctypes.data, 4, 4, 0, 0, out.ctypes.data, lse.ctypes.data, 3)
    assert (out == 1).all()

attend()
child = os.fork()
if child == 0:
    signal.alarm(20)
    attend()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
attend()
"""


def test_pool_survives_a_fork():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def attend_arguments(**changed):
    zeros = torch.zeros(4096)
    at = zeros.data_ptr()
    arguments = dict(q_ptr=at, k_ptr=at, v_ptr=at, num_pages=2, S=16, H=1, D=16, dtype=0, G=1)
    arguments |= dict(scale=1.0, logit_cap=0.0, pages_ptr=at, B=1, R=2, last_page_ptr=0)
    arguments |= dict(last_len_ptr=0, out_ptr=at, lse_ptr=at, threads=1)
    return zeros, arguments | changed


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(dtype=3), "dtype=3"),
        (dict(D=24), "D=24"),
        (dict(D=0), "D=0"),
        (dict(S=0), "S=0"),
        (dict(G=-1), "G=-1"),
        (dict(last_page_ptr=1), "last_page and last_len"),
    ],
)
def test_attend_refuses_impossible_shapes(changed, message):
    _kept, arguments = attend_arguments(**changed)
    with pytest.raises(ValueError, match=message):
        _native.attend_batch(**arguments)


@pytest.mark.parametrize(
    "row, last_page, last_len, message",
    [
        ([0, 2], -1, 0, "a page id of row 0 is not below num_pages=2"),
        ([2**31 - 1, 0], -1, 0, "a page id of row 0"),
        ([0, 1], 2, 1, "last_page=2"),
        ([0, 1], 1, 0, "last_len=0"),
        ([0, 1], 1, 17, "last_len=17"),
    ],
)
def test_attend_refuses_pages_outside_the_pool(row, last_page, last_len, message):
    pages, last = ids(row), ids([last_page])
    length = ids([last_len])
    _kept, arguments = attend_arguments(
        pages_ptr=pages.data_ptr(), last_page_ptr=last.data_ptr(), last_len_ptr=length.data_ptr()
    )
    with pytest.raises(ValueError, match=message):
        _native.attend_batch(**arguments)


def test_copy_pages():
    src = torch.randint(0, 255, (6, 40, 7), dtype=torch.uint8)
    dst = torch.full((5, 40, 7), 255, dtype=torch.uint8)
    src_ids, dst_ids = torch.tensor([4, 0, 4]), torch.tensor([1, 3, 0])
    at = (src.data_ptr(), dst.data_ptr(), 280, src_ids.data_ptr(), dst_ids.data_ptr())
    _native.copy_pages(*at, 3)
    expected = torch.full_like(dst, 255)
    expected[dst_ids] = src[src_ids]
    assert torch.equal(dst, expected)
    _native.copy_pages(*at, 0)
    assert torch.equal(dst, expected)


@examples
@given(
    dtype=st.sampled_from(list(DTYPES)),
    D=st.sampled_from([16, 48, 80, 128]),
    S=st.integers(1, 40),
    H=st.integers(1, 5),
    zeros=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_digest_is_exact_and_touches_only_its_rows(dtype, D, S, H, zeros, seed):
    torch.manual_seed(seed)
    P = 6
    k = (torch.randn(P, S, H, D) * 10 ** torch.empty(P, 1, 1, 1).uniform_(-6, 4)).to(dtype)
    if zeros:
        k[torch.rand(k.shape) < 0.5] *= 0  # of both signs
    rows = torch.randperm(P)[: seed % (P + 1)]
    kmin, kmax = torch.full((2, P, H, D), math.nan, dtype=dtype)
    _native.digest_pages(
        k.data_ptr(), S, H, D, DTYPES[dtype], rows.data_ptr(), len(rows), kmin.data_ptr(),
        kmax.data_ptr(),
    )  # fmt: skip
    assert torch.equal(kmin[rows], k[rows].amin(1)) and torch.equal(kmax[rows], k[rows].amax(1))
    others = sorted(set(range(P)) - set(rows.tolist()))
    assert kmin[others].isnan().all() and kmax[others].isnan().all()


def run_score(q, kmin, kmax, table, n_full, scale, reduce, threads=1):
    P, H, D = kmin.shape
    B, N = table.shape
    out = torch.full((B, N), math.nan)
    _native.score_pages(
        q.data_ptr(), kmin.data_ptr(), kmax.data_ptr(), DTYPES[kmin.dtype], P, H,
        q.shape[1] // H, D, table.data_ptr(), n_full.data_ptr(), B, N, scale, REDUCTIONS[reduce],
        out.data_ptr(), threads,
    )  # fmt: skip
    return out


def plain_score(q, kmin, kmax, table, scale, reduce):
    """One sequence in float64: q [HQ, D], table a list of valid pages -> [len(table)]."""
    H, D = kmin.shape[1:]
    q = q.double().view(H, -1, 1, D)
    low, high = (x[table].double().transpose(0, 1).unsqueeze(1) for x in (kmin, kmax))
    u = torch.maximum(q * low, q * high).sum(-1).flatten(0, 1) * scale
    if reduce == "mass":
        return torch.softmax(u, -1).sum(0)
    return u.sum(0) if reduce == "sum" else (u - torch.logsumexp(u, -1, True)).amax(0)


@examples
@given(
    dtype=st.sampled_from(list(DTYPES)),
    D=st.sampled_from([16, 64, 80, 96, 128]),
    H=st.integers(1, 3),
    G=st.integers(1, 9),
    N=st.integers(1, 70),
    reduce=st.sampled_from(list(REDUCTIONS)),
    magnitude=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_score_matches_float64(dtype, D, H, G, N, reduce, magnitude, seed):
    torch.manual_seed(seed)
    P, B = 80, 3
    kmin, kmax = torch.randn(2, P, H, D).sort(0).values.to(dtype)
    q = torch.randn(B, H * G, D) * magnitude
    table = torch.stack([torch.randperm(P)[:N] for _ in range(B)]).int()
    table[1, ::3] = -1
    n_full = ids([N, N, seed % N])
    table[2, seed % N :] = 10**6  # beyond n_full: not looked at
    out = run_score(q, kmin, kmax, table, n_full, D**-0.5, reduce, threads=1 + seed % 3)
    for b in range(B):
        columns = [i for i in range(int(n_full[b])) if table[b, i] >= 0]
        if columns:
            expected = plain_score(q[b], kmin, kmax, table[b, columns].long(), D**-0.5, reduce)
            # Rounding in a bound grows with its terms; exp turns it into a relative error.
            absolute = 4e-6 * magnitude
            relative = 2 * absolute if reduce == "mass" else 4e-6
            torch.testing.assert_close(
                out[b, columns].double(), expected, rtol=relative, atol=absolute * H * G
            )
        rest = sorted(set(range(N)) - set(columns))
        assert torch.equal(out[b, rest], torch.full((len(rest),), -math.inf))


def test_score_is_an_upper_bound_of_every_token_in_the_page():
    k = torch.randn(20, 32, 1, 128).to(torch.bfloat16)
    q = torch.randn(1, 1, 128)
    table, n_full = torch.arange(20, dtype=torch.int32).view(1, 20), ids([20])
    out = run_score(q, k.amin(1), k.amax(1), table, n_full, 1.0, "sum")
    best = torch.einsum("d,pthd->pth", q[0, 0], k.float()).amax((1, 2))
    assert (out[0] >= best).all()


@pytest.mark.parametrize("reduce", list(REDUCTIONS))
def test_score_of_huge_bounds_is_finite(reduce):
    kmin = torch.full((3, 1, 64), -3e38)
    kmax = torch.full((3, 1, 64), 3e38)
    q = torch.full((1, 2, 64), 3e38)
    out = run_score(q, kmin, kmax, ids([[0, 1, 2]]), ids([3]), 1.0, reduce)
    assert out.isfinite().all() and (out == out[0, 0]).all()


@pytest.mark.parametrize(
    "table, n_full, reduce, message",
    [
        ([0, 4], 2, 0, r"table\[0, 1\]=4 is not below P=4"),
        ([0, 1], 3, 0, r"n_full\[0\]=3"),
        ([0, 1], -1, 0, r"n_full\[0\]=-1"),
        ([0, 1], 2, 3, "reduce=3"),
    ],
)
def test_score_refuses_bad_tables(table, n_full, reduce, message):
    zeros = torch.zeros(256)
    at, table, n_full = zeros.data_ptr(), ids(table), ids([n_full])
    with pytest.raises(ValueError, match=message):
        _native.score_pages(
            at, at, at, 0, 4, 1, 1, 16, table.data_ptr(), n_full.data_ptr(), 1, 2, 1.0, reduce, at
        )
