import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.digest import digest_reference
from sglang_scout.ops.digest_int8 import (
    GROUP,
    PACK_DIGESTS,
    SCORE_PAGES_INT8,
    pack_digests,
    pack_reference,
    score_pages_int8,
    unpack_digests,
)
from sglang_scout.ops.score import REDUCTIONS, score_reference

PACKERS = pytest.mark.parametrize("impl", PACK_DIGESTS.names())
SCORERS = pytest.mark.parametrize("impl", SCORE_PAGES_INT8.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keys(seed, P, H, D, dtype, scale=1.0, outliers=False):
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, 8, H, D, generator=rng) * scale
    if outliers:  # as keys have them: a few channels ten times as large as the others
        k[..., ::17] *= 10
    return k.to(dtype)


def packed(kmin, kmax, impl="reference"):
    P, H, D = kmin.shape
    low, high = (torch.full((P, H, D), 99, dtype=torch.int8) for _ in range(2))
    step = torch.full((P, H, D // GROUP), 99.0)
    pack_digests(kmin, kmax, torch.arange(P), low, high, step, impl=impl)
    return low, high, step


@PACKERS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    D=st.sampled_from((32, 64, 96, 128, 256)),
    exponent=st.integers(-14, 10),
    outliers=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rounds_outward_and_by_less_than_a_step(impl, dtype, sizes, D, exponent, outliers, seed):
    P, H = sizes
    kmin, kmax = digest_reference(keys(seed, P, H, D, dtype, 2.0**exponent, outliers))
    low, high, step = packed(kmin, kmax, impl)
    for got, want in zip((low, high, step), pack_reference(kmin, kmax), strict=True):
        assert torch.equal(got, want)
    below, above = unpack_digests(low, step), unpack_digests(high, step)
    assert (below <= kmin.float()).all()
    assert (above >= kmax.float()).all()
    width = step.repeat_interleave(GROUP, -1) * (1 + 1e-5)
    assert (kmin.float() - below < width).all()
    assert (above - kmax.float() < width).all()


@PACKERS
@pytest.mark.parametrize("value", [0.0, 2.0**-130, 2.0**-120, -(2.0**-118), 3.0e38, -3.4e38])
def test_extreme_values_stay_bounds(impl, value):
    kmin = kmax = torch.full((2, 1, 32), value)
    low, high, step = packed(kmin, kmax, impl)
    assert step.isfinite().all()
    assert (unpack_digests(low, step) <= value).all()
    assert (unpack_digests(high, step) >= value).all()


@PACKERS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_show_in_the_step_of_their_group(impl, bad):
    kmin, kmax = torch.full((1, 2, 64), -1.0), torch.full((1, 2, 64), 1.0)
    kmax[0, 1, 40] = bad
    low, high, step = packed(kmin, kmax, impl)
    assert step.isnan().tolist() == [[[False, False], [False, True]]]
    assert (low[0, 1, 32:] == 0).all()
    assert (high[0, 1, :32] == 127).all()


@PACKERS
def test_other_rows_are_untouched(impl):
    kmin, kmax = digest_reference(keys(1, 4, 2, 32, torch.bfloat16))
    low, high, step = packed(kmin, kmax)
    low[1], high[1], step[1] = 5, 6, 7.0
    before = [x.clone() for x in (low, high, step)]
    pack_digests(kmin, kmax, torch.tensor([0, 3]), low, high, step, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(before, (low, high, step), strict=True))


@SCORERS
@pytest.mark.parametrize("reduce", REDUCTIONS)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 12, 20, 4, 6))),
    D=st.sampled_from((32, 64, 96, 128, 256)),
    seed=st.integers(0, 2**31),
)
def test_equals_the_scores_of_the_unpacked_digests(agree, impl, reduce, sizes, D, seed):
    B, N, P, H, G = sizes
    rng = torch.Generator().manual_seed(seed)
    low, high, step = packed(*digest_reference(keys(seed, P, H, D, torch.bfloat16)))
    q = torch.randn(B, H * G, D, generator=rng)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    out = torch.full((B, N), torch.nan)
    arguments = (q, low, high, step, table, n_full, D**-0.5, reduce)
    got = score_pages_int8(*arguments, impl=impl, out=out)
    assert got is out
    digests = (unpack_digests(x, step).double() for x in (low, high))
    expected = score_reference(q, *digests, table, n_full, D**-0.5, reduce)
    agree(SCORE_PAGES_INT8, got, expected)


@SCORERS
@given(outliers=st.booleans(), spread=st.sampled_from((0.1, 1.0, 20.0)), seed=st.integers(0, 2**31))
def test_a_bound_stays_a_bound(impl, outliers, spread, seed):
    """For every query: at least the bound of the bfloat16 digests, so at least every q.k."""
    P, H, G, D = 6, 2, 3, 64
    kmin, kmax = digest_reference(keys(seed, P, H, D, torch.bfloat16, outliers=outliers))
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(1, H * G, D, generator=rng) * spread
    table, n_full = torch.arange(P, dtype=torch.int32)[None], torch.tensor([P], dtype=torch.int32)
    exact = score_reference(q, kmin, kmax, table, n_full, 1.0, "sum")
    loose = score_pages_int8(q, *packed(kmin, kmax), table, n_full, 1.0, "sum", impl=impl)
    assert (loose >= exact - 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("outliers", [False, True])
def test_selection_holds(outliers):
    """Of 64 pages of 1,024 at least 60 are those of the bfloat16 digests, on random keys."""
    H, G, D, P = 4, 4, 128, 1024
    kmin, kmax = digest_reference(keys(5, P, H, D, torch.bfloat16, outliers=outliers))
    q = torch.randn(4, H * G, D, generator=torch.Generator().manual_seed(6))
    table = torch.arange(P, dtype=torch.int32).repeat(4, 1)
    n_full = torch.full((4,), P, dtype=torch.int32)
    exact = score_reference(q, kmin, kmax, table, n_full, D**-0.5)
    loose = score_pages_int8(q, *packed(kmin, kmax), table, n_full, D**-0.5)
    chosen = [set(row) for row in exact.topk(64).indices.tolist()]
    for row, want in zip(loose.topk(64).indices.tolist(), chosen, strict=True):
        assert len(set(row) & want) >= 60


@pytest.mark.parametrize("impl", ["triton"])
def test_triton_skips_pages_out_of_range(impl):
    kmin, kmax = digest_reference(keys(2, 2, 1, 32, torch.float32))
    low, high, step = (
        torch.zeros(2, 1, 32).char(),
        torch.zeros(2, 1, 32).char(),
        torch.zeros(2, 1, 1),
    )
    pack_digests(kmin, kmax, torch.tensor([2, -1, 2**40]), low, high, step, impl=impl)
    assert not low.any()
    assert not step.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": torch.zeros(2, 1, 32)}, "pack_digests: low has dtype torch.float32"),
        ({"step": torch.zeros(2, 1, 2)}, "pack_digests: step has C=2, expected 1"),
        ({"kmax": torch.zeros(2, 1, 16)}, "pack_digests: kmax has D=16, expected 32"),
    ],
)
def test_malformed_arguments_are_named(change, message):
    codes = torch.zeros(2, 1, 32, dtype=torch.int8)
    arguments = {
        "kmin": torch.zeros(2, 1, 32),
        "kmax": torch.zeros(2, 1, 32),
        "ids": torch.tensor([0]),
        "low": codes,
        "high": codes,
        "step": torch.zeros(2, 1, 1),
    } | change
    with pytest.raises(ValueError, match=message):
        pack_digests(**arguments)


def test_head_sizes_that_groups_do_not_divide_are_refused():
    codes = torch.zeros(2, 1, 48, dtype=torch.int8)
    with pytest.raises(ValueError, match="pack_digests: low has D=48, expected a multiple of 32"):
        pack_digests(
            codes.float(), codes.float(), torch.tensor([0]), codes, codes, torch.zeros(2, 1, 1)
        )
    with pytest.raises(
        ImplementationError, match="D=512; triton supports multiples of 16 up to 256"
    ):
        wide = torch.zeros(2, 1, 512)
        pack_digests(
            wide, wide, torch.tensor([0]), wide.char(), wide.char(), torch.zeros(2, 1, 16),
            impl="triton",
        )  # fmt: skip
