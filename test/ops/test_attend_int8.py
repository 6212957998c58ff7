"""Attention over int8 pages, on every instruction set: against the reference, and against fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.attend import attend_reference
from sglang_scout.ops.attend_int8 import (
    attend_int8_reference,
    attend_pages_int8,
    error_bound,
    rounding_bound,
)
from sglang_scout.ops.quantize import order_codes, plain_codes, quantize_pages_reference

pytestmark = pytest.mark.usefixtures("isa")


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def pool_of(k, v, k_scale, v_scale):
    """(codes, scales, page_size) as `attend_pages_int8` takes them, of codes [P, S, H, D]."""
    return order_codes(k, v), torch.stack((k_scale, v_scale), 1), k.shape[1]


def int8_pages(k, v):
    (k, k_scale), (v, v_scale) = (quantize_pages_reference(x) for x in (k, v))
    return pool_of(k, v, k_scale, v_scale)


def exactly(q, pool, pages, last_page, last_len, scale, logit_cap=0.0):
    """Oracle: the dequantised tokens written out, in float64, row by row and head by head."""
    codes = plain_codes(pool[0], pool[2], q.shape[2])
    k, v = (
        of.double() * scale.double()[:, None, :, None]
        for of, scale in zip(codes, pool[1].unbind(1), strict=True)
    )
    G = q.shape[1] // k.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for b in range(len(q)):
        parts = [(page, k.shape[1]) for page in pages[b].tolist() if page >= 0]
        if last_page is not None and last_page[b] >= 0:
            parts.append((int(last_page[b]), int(last_len[b])))
        if not parts:
            continue
        keys, values = (torch.cat([x[page, :n] for page, n in parts]) for x in (k, v))
        s = torch.einsum("hgd,thd->hgt", q[b].double().view(-1, G, q.shape[2]), keys) * scale
        s = logit_cap * torch.tanh(s / logit_cap) if logit_cap else s
        lse[b] = torch.logsumexp(s, -1).flatten()
        out[b] = torch.einsum("hgt,thd->hgd", torch.softmax(s, -1), values).flatten(0, 1)
    return out, lse


def attend(q, pool, pages, last_page, last_len, scale, logit_cap=0.0, impl="native"):
    """Into poisoned memory."""
    out = (torch.full(q.shape, math.nan), torch.full(q.shape[:2], math.nan))
    attend_pages_int8(q, *pool, pages, last_page, last_len, scale, logit_cap, impl=impl, out=out)
    return out


def inputs(seed, B=3, P=7, S=8, H=2, G=3, D=64, R=5, spread=1.0):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H * G, D, generator=rng) * spread
    k, v = (torch.randn(P, S, H, D, generator=rng) for _ in range(2))
    pages = torch.randint(-1, P, (B, R), generator=rng, dtype=torch.int32)
    last_page = torch.randint(-1, P, (B,), generator=rng, dtype=torch.int32)
    last_len = torch.randint(1, S + 1, (B,), generator=rng, dtype=torch.int32)
    return q, k, v, pages, last_page, last_len


def assert_same_pages(q, got, expected, pool, pages, last, scale, rel=1e-5):
    """Against the reference over the same codes: what `rounding_bound` and the tolerance allow."""
    bounds = rounding_bound(q, pool[1], pages, last[0], scale, pool[2])
    empty = expected[1].isinf()
    assert torch.equal(got[1].isinf(), empty)
    for a, e, bound in zip(got, expected, (bounds[0][..., None], bounds[1]), strict=True):
        e = e.masked_fill(e.isinf(), 0)
        error = (a.masked_fill(a.isinf(), 0) - e).abs()
        assert (error <= bound + rel + rel * e.abs()).all(), float((error - bound).max())


def assert_within_bound(q, k, v, got, pool, pages, last, scale, logit_cap=0.0):
    """int8 against the pages before quantisation: what `error_bound` promises."""
    expected = attend_reference(q, k, v, pages, *last, scale, logit_cap)
    bounds = error_bound(q, pool[1], pages, last[0], scale)
    empty = expected[1].isinf()
    assert torch.equal(got[1].isinf(), empty)
    lse_error = (got[1] - expected[1]).masked_fill(empty, 0).abs()
    magnitude = expected[1].masked_fill(empty, 0).abs()
    rounding = rounding_bound(q, pool[1], pages, last[0], scale, k.shape[1])
    assert (lse_error <= bounds[1] + rounding[1] + 1e-5 + 1e-5 * magnitude).all()
    out_bound = (bounds[0] + rounding[0])[..., None]
    assert ((got[0] - expected[0]).abs() <= out_bound + 1e-5).all()


@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 9, 70, 4))),
    G=st.integers(1, 17),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    R=st.integers(0, 6),
    spread=st.sampled_from((0.1, 1.0, 8.0)),
    logit_cap=st.sampled_from((0.0, 30.0)),
    with_last=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference_and_keeps_the_bound(
    sizes, G, D, R, spread, logit_cap, with_last, seed
):
    B, P, S, H = sizes
    q, k, v, pages, *last = inputs(seed, B, P, S, H, G, D, R, spread)
    last = last if with_last else [None, None]
    k *= 10 ** torch.empty(P, 1, H, 1).uniform_(-2, 0)  # scales differ by page and head
    v *= 10 ** torch.empty(P, 1, H, 1).uniform_(-2, 0)
    pool = int8_pages(k, v)
    got = attend(q, pool, pages, *last, D**-0.5, logit_cap)
    expected = exactly(q, pool, pages, *last, D**-0.5, logit_cap)
    assert_same_pages(q, got, expected, pool, pages, last, D**-0.5)
    assert_within_bound(q, k, v, got, pool, pages, last, D**-0.5, logit_cap)


@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_shapes_of_real_models(G, D):
    q, k, v, pages, *last = inputs(G, B=2, P=20, S=32, H=2, G=G, D=D, R=12)
    pool = int8_pages(k, v)
    got = attend(q, pool, pages, *last, D**-0.5)
    expected = attend_int8_reference(q, *pool, pages, *last, D**-0.5)
    assert_same_pages(q, got, expected, pool, pages, last, D**-0.5)
    # Far below the worst case on ordinary data.
    assert (got[0] - expected[0]).abs().max() < 2e-4
    assert (got[1] - expected[1]).nan_to_num().abs().max() < 2e-4


def test_error_on_normal_data_is_what_the_documentation_says():
    torch.manual_seed(1)
    k, v = torch.randn(2, 64, 32, 2, 128)
    q = torch.randn(4, 8, 128)
    pages = torch.arange(64, dtype=torch.int32).expand(4, -1).contiguous()
    pool = int8_pages(k, v)
    got = attend(q, pool, pages, None, None, 128**-0.5)
    expected = attend_reference(q, k, v, pages, None, None, 128**-0.5)
    out, lse = ((a - b).square().mean().sqrt() for a, b in zip(got, expected, strict=True))
    assert lse < 6e-4
    assert out < 0.015 * expected[0].std()
    assert (got[0] - expected[0]).abs().max() < 4e-3


@pytest.mark.parametrize("last", [(None, None), (i32([-1, -1]), i32([0, 999]))])
@pytest.mark.parametrize("R", [0, 3])
def test_empty_set(last, R):
    q, k, v, *_ = inputs(2, B=2)
    pages = torch.full((2, R), -1, dtype=torch.int32)
    out, lse = attend(q, int8_pages(k, v), pages, *last, 0.125)
    assert (out == 0).all() and (lse == -math.inf).all()
    bounds = error_bound(q, torch.ones(7, 2, 2), pages, last[0], 1.0)
    assert (bounds[0] == 0).all() and (bounds[1] == 0).all()


def test_pages_of_zeros():
    """Scale 0: every score of such a page is 0 and its values are 0; no NaN."""
    q, k, v, *_ = inputs(3, B=1, P=3, S=16)
    k[1] = v[1] = 0
    pool = int8_pages(k, v)
    assert (pool[1][1] == 0).all()
    out, lse = attend(q, pool, i32([[1]]), None, None, 1.0)
    assert (out == 0).all()
    assert torch.allclose(lse, torch.full_like(lse, math.log(16)), rtol=1e-6)
    every = i32([[0, 1, 2]])
    got = attend(q, pool, every, None, None, 0.125)
    assert_within_bound(q, k, v, got, pool, every, [None, None], 0.125)


def test_one_huge_outlier():
    """It costs the other values of its page and head their precision, and nobody else's."""
    q, k, v, *_ = inputs(5, B=1, P=3, S=16)
    v[1, 4, 0, 7] = 1e30
    k[2, 2, 1, 3] = -1e4
    pool = int8_pages(k, v)
    every = i32([[0, 1, 2]])
    got = attend(q, pool, every, None, None, 0.125)
    expected = attend_int8_reference(q, *pool, every, None, None, 0.125)
    assert_same_pages(q, got, expected, pool, every, [None, None], 0.125)
    assert_within_bound(q, k, v, got, pool, every, [None, None], 0.125)
    alone = attend(q, pool, i32([[0]]), None, None, 0.125)
    assert_within_bound(q, k, v, alone, pool, i32([[0]]), [None, None], 0.125)


def test_identical_keys_give_the_mean():
    k = torch.randn(1, 1, 2, 128).expand(4, 32, 2, 128).contiguous()
    v = torch.randn(4, 32, 2, 128)
    q = torch.randn(1, 10, 128)
    pool = int8_pages(k, v)
    out, _ = attend(q, pool, i32([[3, 1, 0, 2]]), None, None, 128**-0.5)
    scale = pool[1][:, 1].double()[:, None, :, None]
    values = plain_codes(pool[0], 32, 128)[1].double() * scale
    mean = values.mean((0, 1)).repeat_interleave(5, 0)
    assert torch.allclose(out[0].double(), mean, atol=1e-6)


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e9, 1e18, 3e38])
@pytest.mark.parametrize("rising", [True, False])
def test_huge_scores_select_the_largest(magnitude, rising):
    """exp would overflow or vanish; the maximum moves on every page, or is on the first one."""
    P, S, D = 5, 16, 64
    order = torch.arange(1, P * S + 1, dtype=torch.float32)
    k = (order if rising else order.flip(0)).view(P, S, 1, 1).expand(P, S, 1, D).contiguous()
    v = torch.randn(P, S, 1, D)
    pool = int8_pages(k, v)
    q = torch.full((1, 3, D), magnitude)
    out, lse = attend(q, pool, i32([list(range(P))]), None, None, 1.0)
    assert out.isfinite().all() and lse.isfinite().all()
    if magnitude <= 1e18:
        best = -1 if rising else 0
        assert torch.allclose(
            out[0, 0],
            (plain_codes(pool[0], S, D)[1][best, best] * pool[1][best, 1]).flatten(),
            rtol=1e-6,
        )


@pytest.mark.parametrize("which", [2, 3])
def test_pages_that_were_not_finite_are_not_hidden(which):
    q, k, v, *_ = inputs(7, B=1, H=1)
    (k if which == 2 else v)[2, 3, 0, 9] = math.nan
    pool = int8_pages(k, v)
    out, _ = attend(q, pool, i32([[1, 2, 3]]), None, None, 0.125)
    assert out.isnan().all()
    out, lse = attend(q, pool, i32([[1, -1, 3]]), None, None, 0.125)
    assert out.isfinite().all() and lse.isfinite().all()


def test_what_is_not_listed_is_never_used(agree):
    """NaN scales of unlisted pages, and codes behind last_len, change nothing."""
    q, k, v, *_ = inputs(4, B=2, P=6, S=8)
    pool = int8_pages(k, v)
    pages, last_page, last_len = i32([[-1, 2, -1, 3], [-1] * 4]), i32([4, 5]), i32([3, 1])
    expected = attend(q, pool, pages, last_page, last_len, 0.125)
    pool[1][:2] = math.nan
    changed = plain_codes(pool[0], 8, 64)
    for codes in changed:
        codes[:2], codes[4, 3:], codes[5, 1:] = -128, 127, 127
    got = attend(q, (order_codes(*changed), *pool[1:]), pages, last_page, last_len, 0.125)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_every_code_is_widened_exactly():
    """With one token the result is V itself, in order, for all 256 codes; the scale is exact."""
    v = torch.arange(256 * 4).view(1, 1, 8, 128).to(torch.int8)
    k = torch.zeros_like(v)
    pool = pool_of(k, v, torch.ones(1, 8), torch.full((1, 8), 0.25))
    out, lse = attend(torch.ones(1, 8, 128), pool, i32([[0]]), None, None, 1.0)
    assert torch.equal(out.view(v.shape), v.float() / 4)
    assert (lse == 0).all()


def test_query_is_rounded_once_and_finely():
    codes = torch.ones(1, 1, 1, 64, dtype=torch.int8)
    pool = pool_of(codes, codes, *(torch.ones(1, 1),) * 2)
    q = torch.linspace(-1, 1, 64).square().expand(1, 2, 64).contiguous()
    q[0, 1] += 2.0**-12
    _, lse = attend(q, pool, i32([[0]]), None, None, 1.0)
    _, expected = attend_int8_reference(q, *pool, i32([[0]]), None, None, 1.0)
    _, bound = rounding_bound(q, pool[1], i32([[0]]), None, 1.0, 1)
    error = (lse - expected).abs()
    assert (error <= bound / 127 + 1e-5).all()  # the codes here are 1, not 127
    # 2^-12 of the largest element is seen; rounded to 8 bits it would be lost.
    assert lse[0, 1] - lse[0, 0] == pytest.approx(64 * 2.0**-12, abs=64 * 2.0**-15)


@pytest.mark.parametrize("code", [127, -128])
def test_the_largest_sums_fit_their_words(code):
    """Every product at its largest, in the largest head: 2^31 - 65536 in codes."""
    k = torch.full((2, 32, 1, 512), code, dtype=torch.int8)
    pool = pool_of(k, k, torch.ones(2, 1), torch.ones(2, 1))
    q = torch.stack([torch.ones(512), -torch.ones(512)])[None]
    out, lse = attend(q, pool, i32([[0, 1]]), None, None, 2.0**-12)
    assert (out == code).all()
    expected = torch.tensor([code, -code]) / 8 + math.log(64)
    torch.testing.assert_close(lse[0], expected, rtol=1e-5, atol=1e-5)


def test_small_weights_of_a_page_without_the_largest_one_are_kept():
    """Weights are coded relative to their own page: many small ones beside a large one count."""
    P, S, D = 65, 32, 64
    k = torch.zeros(P, S, 1, D, dtype=torch.int8)
    k[0, 0] = 127
    v = torch.ones_like(k)
    v[0] = 0
    pool = pool_of(k, v, torch.ones(P, 1), torch.ones(P, 1))
    q = torch.full((1, 1, D), math.log(1e5) / (127 * D))  # one weight of 1, others of 1e-5
    args = (i32([list(range(P))]), None, None, 1.0)
    out, lse = attend(q, pool, *args)
    expected = attend_int8_reference(q, *pool, *args)
    assert expected[0].min() > 0.02
    assert torch.allclose(out, expected[0], rtol=1e-3)
    assert torch.allclose(lse, expected[1], rtol=1e-5)


def test_result_does_not_depend_on_threads_or_neighbours():
    q, k, v, *_ = inputs(8, B=6, P=16, S=32, H=2, G=5, D=128)
    pool = int8_pages(k, v)
    pages = torch.stack([torch.randperm(16)[:7] for _ in range(6)]).int()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = [attend(q[b : b + 1], pool, pages[b : b + 1], None, None, 0.1) for b in range(6)]
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, lse = attend(q, pool, pages, None, None, 0.1)
            assert torch.equal(out, torch.cat([o for o, _ in single]))
            assert torch.equal(lse, torch.cat([x for _, x in single]))
    finally:
        torch.set_num_threads(before)


def test_arguments_are_checked():
    q, k, v, pages, last_page, last_len = inputs(1)
    pool = int8_pages(k, v)

    def call(*changed, **named):
        args = [q, *pool, pages, last_page, last_len, 0.125]
        for index, value in changed:
            args[index] = value
        return attend_pages_int8(*args, **named)

    with pytest.raises(ValueError, match="attend_pages_int8: codes has dtype torch.float32"):
        call((1, pool[0].float()))
    with pytest.raises(ValueError, match=r"attend_pages_int8: codes has 3 axes.*\[P, H, 2, c\]"):
        call((1, pool[0].flatten(2)))
    with pytest.raises(ValueError, match="attend_pages_int8: codes has c=1024, expected 2048"):
        call((3, 17))
    with pytest.raises(ValueError, match="attend_pages_int8: scales has P=3, expected 7"):
        call((2, pool[1][:3]))
    with pytest.raises(ValueError, match="last_page and last_len come together"):
        call((5, None))
    with pytest.raises(ValueError, match="logit_cap is -1"):
        call(logit_cap=-1)
    with pytest.raises(ValueError, match="attend_pages_int8: pages has 7, expected values below 7"):
        call((4, torch.full_like(pages, 7)), impl="native")
    with pytest.raises(ValueError, match="attend_pages_int8: last_len has 9"):
        call((5, torch.zeros_like(last_page)), (6, torch.full_like(last_len, 9)), impl="native")
    with pytest.raises(ImplementationError, match="scales is not contiguous"):
        call((2, pool[1].transpose(1, 2).contiguous().transpose(1, 2)), impl="native")
    long, one = torch.ones(1, 1, 1, 528, dtype=torch.int8), torch.ones(1, 1)
    with pytest.raises(
        ImplementationError, match="D=528; native supports multiples of 16 up to 512"
    ):
        attend_pages_int8(
            torch.ones(1, 1, 528),
            *pool_of(long, long, one, one),
            *(i32([[0]]), None, None, 1.0),
            impl="native",
        )
