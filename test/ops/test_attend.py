"""Attention over pages and merging of two parts: every implementation against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import FP8, agrees, densely, i32, inputs
from implementations import implementations, usable
from sglang_scout.ops.attend import attend_pages, attend_pages_reference, merge_states
from sglang_scout.ops.triton import attend as kernel

IMPLS = implementations(attend_pages)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8)
KINDS = pytest.mark.parametrize(
    ("dtype", "rounded"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)


@IMPLS
@pytest.mark.usefixtures("isa")
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 9, 33, 4, 17))),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    R=st.integers(0, 6),
    spread=st.sampled_from((0.1, 1.0, 8.0)),
    with_last=st.booleans(),
    with_slots=st.booleans(),
    rounded=st.booleans(),
    per_head=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_dense_softmax(
    agree, impl, dtype, sizes, D, R, spread, with_last, with_slots, rounded, per_head, seed
):
    """Rows of any length, some behind gaps, of page ids, some of them without a slot. NaN in every head of a page that
    its list lacks, and after last_len."""
    B, P, S, H, G = sizes
    q, k, v, pages, *last = inputs(seed, B, P, S, H, G, D, R, dtype, spread, rounded, per_head)
    last = last if with_last else (None, None)
    column = torch.arange(R, dtype=torch.int32)
    n_pages = (column + 1).where(pages >= 0, 0).amax(1) if R else i32([0] * len(pages))
    n_pages = n_pages if seed % 2 else None
    slots, slot_of = pages, None
    if with_slots:
        slot_of = torch.randint(-2, P, (P,), dtype=torch.int32)
        slots = slot_of[pages.clamp(min=0).long()].where(pages >= 0, -1)
    call = q, k.clone(), v.clone(), slots, *last, D**-0.5
    used = torch.zeros(P + 1, H, S, dtype=torch.bool)  # page -1 is the last
    of_heads = slots.view(B, len(slots) // B, R).expand(B, H, R).clamp(min=-1).long()
    used[of_heads, torch.arange(H)[:, None]] = True
    for page, length in zip(*last, strict=True) if with_last else ():
        used[page, :, :length] |= page >= 0
    for pool in (k, v):
        pool.view(torch.uint8).masked_fill_(~used[:P].transpose(1, 2)[..., None], 0xFF)
    got = impl(q, k, v, pages, *last, D**-0.5, slot_of=slot_of, n_pages=n_pages)
    # Rounding of a logit is relative to its size, and its weight's relative error is the logit's absolute error.
    agrees(agree, impl, got, call, times=max(1.0, spread))


@pytest.mark.parametrize("splits", [2, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_splits_is_merged(agree, monkeypatch, splits, dtype):
    monkeypatch.setattr(kernel, "split_count", lambda *_: splits)
    q, k, v, pages, *last = inputs(3, 3, 9, 4, 2, 3, 64, 37, dtype, 2.0, True, per_head=True)
    pages[1], pages[2, 3:] = -1, -1
    last[0][0] = -1  # with pages[1], an empty row
    for _ in range(2):  # the first has left its counters as it found them
        got = usable(kernel.attend_pages)(q, k, v, pages, *last, 0.125)
        agrees(agree, kernel.attend_pages, got, (q, k, v, pages, *last, 0.125), times=2.0)


def test_rows_are_split_where_that_ends_the_last_wave_sooner():
    slots = 3 * 132
    found = [kernel.split_count(8 * B, 17, slots) for B in (1, 4, 8, 16, 24, 32, 48, 96)]
    assert found == [16, 8, 4, 2, 2, 1, 1, 1]  # at most one wave, as long as there is a choice
    assert kernel.split_count(256, 1025, slots) == 16  # wide: rows may differ in length
    assert kernel.split_count(8, 0, slots) == kernel.split_count(8, 1, slots) == 1
    assert kernel.split_count(5000, 1025, slots) == 1


@IMPLS
def test_no_request_at_all(impl):
    q, k, v, pages, *last = (x[:0] if i in (0, 3, 4, 5) else x for i, x in enumerate(inputs(2)))
    out, lse = impl(q, k, v, pages, *last, 0.125, n_pages=i32([]))
    assert (out.shape, lse.shape) == ((0, 6, 64), (0, 6))


@IMPLS
@pytest.mark.parametrize("sign", [1.0, -1.0])
@KINDS
def test_large_scores_do_not_overflow(agree, impl, sign, dtype, rounded):
    q, k, v, pages, *last = inputs(6, dtype=dtype, rounded=rounded)
    k[..., 0], q[..., 0] = 40.0, sign * 40.0  # every score near +-1600
    pages[:, 0] = 1
    got = impl(q, k, v, pages, *last, 1.0)
    expected = densely(q, k, v, pages, *last, 1.0)
    assert torch.allclose(got[1].double(), expected[1], rtol=1e-6)
    # Scores of 1600 have 1e-4 of rounding error before the exponential, in every implementation.
    agrees(agree, impl, got, (q, k, v, pages, *last, 1.0), times=200)


@implementations(attend_pages, only=("native", "reference"))  # kernels split floats: inf - inf
@KINDS
def test_keys_that_mask_their_tokens(impl, dtype, rounded):
    """A key of -inf where the query is positive masks its token; if all are masked, the set is empty."""
    q, k, v, pages, last_page, last_len = inputs(5, B=2, G=4, dtype=dtype, rounded=rounded)
    q[..., 0] = 1.0
    pages[:] = i32([0, 1, 2, 3, 4])
    last = i32([5, 6]), last_len
    k[:, :, 0, 0] = -torch.inf
    out, lse = impl(q, k, v, pages, *last, 0.125)
    assert (out[:, :4] == 0).all() and (lse[:, :4] == -torch.inf).all()
    assert lse[:, 4:].isfinite().all()
    k[4, 2, 0, 1] = torch.nan
    out, lse = impl(q, k, v, pages, *last, 0.125)
    assert lse[:, :4].isnan().all(), "a NaN is not hidden by them"
    k[4, 2, 0, 1] = 0.0
    k[2, 5, 0, 0] = 1.0  # one token of each row is seen
    out, _ = impl(q, k, v, pages, *last, 0.125)
    for row in range(2):
        assert torch.equal(out[row, :4], v[2, 5, 0].float().expand(4, -1))


@pytest.mark.parametrize(
    ("pages", "more"),
    [
        ([0, 5, 2], {"slot_of": torch.arange(8, dtype=torch.int32)[:3]}),  # behind it are slots
        ([0, 2, 3, 4], {"n_pages": i32([2])}),
    ],
)
def test_triton_looks_up_no_slot_beyond_the_last_and_no_page_behind_those_of_a_row(pages, more):
    q, k, v, *_ = inputs(9, B=1)
    got = usable(kernel.attend_pages)(q, k, v, i32([pages]), None, None, 0.125, **more)
    expected = usable(kernel.attend_pages)(q, k, v, i32([[0, 2]]), None, None, 0.125)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@IMPLS
@pytest.mark.parametrize("columns", [7, 700])
@pytest.mark.parametrize("with_last", [False, True])
def test_a_wide_table_gives_what_its_pages_give(agree, impl, columns, with_last):
    """The tail comes after a row's own columns, even if there are none."""
    q, k, v, *_ = inputs(11, B=3, P=8)
    last = (i32([5, 6, -1]), i32([1, 2, 1])) if with_last else (None, None)
    n_pages = i32([4, 0, columns])
    pages = torch.full((3, columns), -1, dtype=torch.int32)
    pages[0, :4] = i32([0, -1, 2, 3])
    pages[2, -1], pages[2, columns // 2], pages[2, 0] = 1, 4, 7
    got = impl(q, k, v, pages, *last, 0.125, n_pages=n_pages)
    narrow = i32([[0, 2, 3], [-1, -1, -1], [1, 4, 7]])
    agree(attend_pages, got, attend_pages_reference(q, k, v, narrow, *last, 0.125))


# Merging of two parts -----------------------------------------------------------------------------

MERGES = implementations(merge_states)
INF = torch.inf


def in_double(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.double(), lse_b.double()
    top = torch.maximum(a, b).nan_to_num(neginf=0.0)
    weight_a, weight_b = torch.exp(a - top)[..., None], torch.exp(b - top)[..., None]
    total = weight_a + weight_b
    out = (weight_a * out_a.double() + weight_b * out_b.double()) / total
    return out.masked_fill(total == 0, 0.0), (top + total[..., 0].log())


lse_values = st.one_of(st.just(-INF), st.floats(-300, 300, width=32), st.floats(-3, 3, width=32))


@MERGES
@given(
    pairs=st.lists(st.tuples(lse_values, lse_values), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_equals_double_precision(agree, impl, pairs, seed):
    rng = torch.Generator().manual_seed(seed)
    lse_a, lse_b = torch.tensor(pairs).T.unsqueeze(0).contiguous().unbind(1)  # [1, HQ]
    out_a, out_b = (torch.randn(1, len(pairs), 8, generator=rng) for _ in range(2))
    out_a[lse_a == -INF], out_b[lse_b == -INF] = 0, 0
    expected = in_double(out_a, lse_a, out_b, lse_b)
    agree(merge_states, impl(out_a, lse_a, out_b, lse_b), expected)
    agree(merge_states, impl(out_b, lse_b, out_a, lse_a), expected)


@MERGES
def test_an_empty_part_leaves_the_other_exactly(impl):
    nothing = torch.zeros(2, 4, 16), torch.full((2, 4), -INF)
    for part in ((torch.randn(2, 4, 16), torch.randn(2, 4) * 30), nothing):
        for merged in (impl(*part, *nothing), impl(*nothing, *part)):
            assert all(map(torch.equal, merged, part))
