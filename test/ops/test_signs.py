"""Scores of pages by the signs of their keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.signs import LEAST_SPREAD, build_layer_signs, score_signs

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCORES = pytest.mark.parametrize("impl", score_signs.names())
SIZES = st.tuples(*(st.integers(1, n) for n in (3, 12, 20, 2, 6)))


def words(k):
    """(low, high) of all pages of one layer [P, 32, H, D]."""
    low, high = torch.full((2, 1, len(k), *k.shape[2:]), math.nan, dtype=k.dtype)
    build_layer_signs.reference(LayerPages.of([k], [k], "cpu"), torch.arange(len(k)), low, high)
    return low[0], high[0]


def inputs(seed, B, N, P, H, G, D=64, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, 32, H, D, generator=rng).to(dtype)
    q = torch.randn(B, H * G, D, generator=rng)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return q, *words(k), table, n_full, k


@SCORES
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=SIZES,
    D=st.sampled_from((16, 64, 80, 128)),
    seed=st.integers(0, 99),
)
def test_agrees_with_the_formula(impl, agree, dtype, sizes, D, seed):
    B, N, P, H, G = sizes
    q, low, high, table, n_full, k = inputs(seed, B, N, P, H, G, D, dtype)
    signs = torch.where(torch.signbit(k), -1.0, 1.0).double()
    expected = torch.full((B, N), -torch.inf, dtype=torch.float64)
    for b in range(B):
        columns = [n for n in range(int(n_full[b])) if table[b, n] >= 0]
        if not columns:
            continue
        keys = signs[table[b, columns].long()].repeat_interleave(G, 2)  # [n, 32, HQ, D]
        u = torch.einsum("hd,nthd->nth", q[b].double(), keys).amax(1)
        least = LEAST_SPREAD * u.abs().amax(0)
        u = u - u.mean(0)
        spread = u.square().mean(0).sqrt()
        expected[b, columns] = torch.where(spread > least, u / spread, 0.0).amax(1)
    got = score_signs(q, low, high, table, n_full, impl=impl)
    agree(score_signs, got.nan_to_num(neginf=-9.0), expected.nan_to_num(neginf=-9.0))
    assert torch.equal(got == -torch.inf, expected == -torch.inf)


@SCORES
@settings(max_examples=12)
@given(seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_mean_and_deviation_are_over_all_pages_of_a_long_row(impl, agree, seed, dtype):
    """Pages of several blocks, of which one has no page at all and the last is cut."""
    q, low, high, _, n_full, _ = inputs(seed, 2, 1, 50, 1, 3, 32, dtype)
    table = torch.randint(0, 50, (2, 300), dtype=torch.int32)
    table[0, 64:128] = -1
    n_full[0], n_full[1] = 290, 5
    q[1, 2] = 0.0
    got = score_signs(q, low, high, table, n_full, impl=impl)
    expected = score_signs.reference(q, low, high, table, n_full)
    agree(score_signs, got, expected, dtype)


@SCORES
@pytest.mark.parametrize("exponent", [-20, 20])
def test_the_size_of_a_query_does_not_matter(impl, exponent):
    q, low, high, table, n_full, _ = inputs(4, 3, 20, 30, 2, 3)
    scores = [score_signs(x, low, high, table, n_full, impl=impl) for x in (q, q * 2.0**exponent)]
    assert torch.equal(*scores)


@SCORES
@settings(max_examples=12)
@given(seed=st.integers(0, 99), exponents=st.lists(st.integers(-6, 0), min_size=64, max_size=64))
def test_channels_of_very_different_size(impl, agree, seed, exponents):
    q, low, high, table, n_full, _ = inputs(seed, 2, 12, 20, 2, 2)
    q = q * 2.0 ** torch.tensor(exponents, dtype=torch.float32)
    got = score_signs(q, low, high, table, n_full, impl=impl)
    agree(score_signs, got, score_signs.reference(q, low, high, table, n_full))


@SCORES
def test_one_page_and_no_page(impl):
    q, low, high, *_ = inputs(2, 3, 4, 5, 2, 2)
    table = torch.tensor([[3, 1, -1, -1], [-1, 2, -1, 4], [0, 1, 2, 3]], dtype=torch.int32)
    got = score_signs(q, low, high, table, torch.tensor([1, 3, 0], dtype=torch.int32), impl=impl)
    assert got.tolist() == [
        [0.0, -math.inf, -math.inf, -math.inf],
        [-math.inf, 0.0, -math.inf, -math.inf],
        [-math.inf] * 4,
    ]


@SCORES
@pytest.mark.parametrize(("B", "N"), [(0, 4), (2, 0)])
def test_no_request_and_no_column(impl, B, N):
    q, low, high, *_ = inputs(2, B, 4, 5, 2, 2)
    table, n_full = torch.zeros(B, N, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    assert score_signs(q, low, high, table, n_full, impl=impl).shape == (B, N)


@pytest.mark.parametrize("impl", ["native"])
def test_an_id_outside_of_the_pool_is_refused(impl):
    q, low, high, table, n_full, _ = inputs(3, 2, 4, 5, 2, 2)
    table[0, 0], n_full[0] = 5, 1
    with pytest.raises(ValueError, match=r"table\[0, 0\]=5 is not below P=5"):
        score_signs(q, low, high, table, n_full, impl=impl)
