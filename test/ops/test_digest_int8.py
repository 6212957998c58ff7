import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.engine import digest_forms
from sglang_scout.ops.digest import digest_reference
from sglang_scout.ops.digest_int8 import (
    BUILD_LAYER_DIGESTS_INT8,
    GROUP,
    LEAST_STEP,
    NO_STEP_BITS,
    SCORE_PAGES_INT8,
    Int8Digests,
    build_layer_digests_int8,
    code_reference,
    decode,
    score_pages_int8,
)
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.score import REDUCTIONS, score_reference

BUILDERS = pytest.mark.parametrize("impl", BUILD_LAYER_DIGESTS_INT8.names())
SCORERS = pytest.mark.parametrize("impl", SCORE_PAGES_INT8.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keys(seed, P, H, D, dtype, scale=1.0, outliers=False, S=8):
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, S, H, D, generator=rng) * scale
    if outliers:  # as keys have them: a few channels ten times as large as the others
        k[..., ::17] *= 10
    return k.to(dtype)


def pools(L, P, H, D):
    """Pools that hold what no digest is: low, its steps, high, its steps."""
    codes = [torch.full((L, P, H, D), 99, dtype=torch.int8) for _ in range(2)]
    steps = [torch.full((L, P, H, D // GROUP), 99.0, dtype=torch.bfloat16) for _ in range(2)]
    return Int8Digests(codes[0], steps[0], codes[1], steps[1])


def built(layers, ids=None, impl="reference"):
    """Digests of K ``[P, S, H, D]`` of each layer."""
    P, _, H, D = layers[0].shape
    into = pools(len(layers), P, H, D)
    ids = torch.arange(P) if ids is None else torch.tensor(ids, dtype=torch.int64)
    build_layer_digests_int8(LayerPages.of(layers, layers, "cpu"), ids, into, impl=impl)
    return into


def words(x):
    """Bits, so that NaNs compare."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def digests_of(k):
    return code_reference(*digest_reference(k))


@BUILDERS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(
        st.integers(1, 3), st.integers(1, 4), st.sampled_from((1, 5, 16)), st.integers(1, 3)
    ),
    D=st.sampled_from((32, 64, 96, 128, 256)),
    exponent=st.integers(-14, 10),
    outliers=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rounds_outward_and_by_less_than_a_step(impl, dtype, sizes, D, exponent, outliers, seed):
    L, P, S, H = sizes
    layers = [keys(seed + i, P, H, D, dtype, 2.0**exponent, outliers, S) for i in range(L)]
    low, low_step, high, high_step = built(layers, impl=impl)
    for i, k in enumerate(layers):
        kmin, kmax = (x.float() for x in digest_reference(k))
        below, above = decode(low[i], low_step[i]), decode(high[i], high_step[i])
        assert (below <= kmin).all()
        assert (above >= kmax).all()
        for bound, value, step in ((kmin, below, low_step[i]), (kmax, above, high_step[i])):
            assert ((bound - value).abs() < step.float().repeat_interleave(GROUP, -1)).all()
            # A step is of the largest magnitude, and no larger than rounding asks for.
            largest = bound.unflatten(-1, (-1, GROUP)).abs().amax(-1)
            assert (step.float() <= (largest / 127 * (1 + 2**-6)).clamp(min=2**-120)).all()


@BUILDERS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 6), st.sampled_from((1, 7, 16, 32)), st.integers(1, 3)),
    D=st.sampled_from((32, 64, 96, 128, 256)),
    exponent=st.integers(-14, 10),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference_bit_by_bit(impl, dtype, sizes, D, exponent, seed):
    P, S, H = sizes
    layers = [keys(seed + i, P, H, D, dtype, 2.0**exponent, S=S) for i in range(2)]
    for got, want in zip(built(layers, impl=impl), built(layers), strict=True):
        assert torch.equal(words(got), words(want))


def special_keys(dtype):
    """Of each group something else: zeros, the least of steps, infinities, NaN, one large value, signed zeros."""
    k = torch.randn(2, 4, 1, 256, generator=torch.Generator().manual_seed(7))
    values = (0.0, 2.0**-130, 2.0**-119, torch.inf, -torch.inf, torch.nan)
    for group, value in enumerate(values if dtype == torch.float32 else (0.0, *values[3:])):
        k[:, :, :, group * GROUP : (group + 1) * GROUP] *= 0.0 if value in (0.0, 2.0**-130) else 1.0
        k[:, 3, :, group * GROUP + 5] = value
    k[0, 0, 0, 224:] = -0.0
    return k.to(dtype)


@BUILDERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_equal_the_reference_bit_by_bit(impl, dtype):
    k = special_keys(dtype)
    got, want = built([k], impl=impl), built([k])
    for one, other in zip(got, want, strict=True):
        assert torch.equal(words(one), words(other))
    for step in (got.low_step, got.high_step):
        assert step.isnan().any() and (words(step)[step.isnan()] == NO_STEP_BITS).all()
        finite = step[~step.isnan()]
        assert (finite > 0).all() and finite.min() == LEAST_STEP


def test_no_step_is_not_taken_for_an_unset_digest():
    assert NO_STEP_BITS != digest_forms._UNSET_BITS
    assert torch.tensor(NO_STEP_BITS, dtype=torch.int16).view(torch.bfloat16).isnan()


@BUILDERS
@pytest.mark.parametrize("value", [0.0, 2.0**-130, 2.0**-120, -(2.0**-118), 3.0e38, -3.4e38])
def test_extreme_values_stay_bounds(impl, value):
    low, low_step, high, high_step = built([torch.full((2, 4, 1, 32), value)], impl=impl)
    assert low_step.isfinite().all() and high_step.isfinite().all()
    assert (decode(low, low_step) <= value).all()
    assert (decode(high, high_step) >= value).all()


@BUILDERS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_show_in_the_steps_of_their_group(impl, bad, dtype):
    k = torch.ones(1, 4, 2, 64, dtype=dtype)
    k[0, 2, 1, 40] = bad
    low, low_step, high, high_step = built([k], impl=impl)
    for step in (low_step, high_step):
        assert step[0].isnan().tolist() == [[[False, False], [False, True]]]
    assert (low[0, 0, 1, 32:] == 0).all() and (high[0, 0, 1, 32:] == 0).all()
    assert (decode(high, high_step)[0, 0, 1, :32] >= 1).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 6, 9, 3))),
    seed=st.integers(0, 2**31),
)
def test_keys_that_lie_in_other_rows(impl, dtype, sizes, seed):
    L, P, R, H = sizes
    rng = torch.Generator().manual_seed(seed)
    layers = [keys(seed + i, R, H, 64, dtype) for i in range(L)]
    ids = torch.randperm(P, generator=rng)[: (P + 1) // 2]
    rows = torch.randint(R, (L, len(ids)), generator=rng)
    got, expected = pools(L, P, H, 64), pools(L, P, H, 64)
    for layer, k in enumerate(layers):
        for into, new in zip(expected, digests_of(k[rows[layer]]), strict=True):
            into[layer, ids] = new
    build_layer_digests_int8(LayerPages.of(layers, layers, "cpu"), ids, got, rows, impl=impl)
    assert all(torch.equal(words(a), words(b)) for a, b in zip(got, expected, strict=True))


def test_native_leaves_other_rows_to_others():
    layers = [keys(0, 3, 2, 64, torch.float32)]
    source, ids = LayerPages.of(layers, layers, "cpu"), torch.tensor([1])
    with pytest.raises(ImplementationError, match="native reads a page in the row of its id"):
        build_layer_digests_int8(source, ids, pools(1, 3, 2, 64), ids[None], impl="native")


@BUILDERS
def test_other_rows_are_untouched(impl):
    layers = [keys(i, 4, 2, 32, torch.bfloat16) for i in range(2)]
    into = built(layers, [2, 0], impl)
    whole = built(layers)
    for pool, digest in zip(into, whole, strict=True):
        assert (pool[:, [1, 3]] == 99).all()
        assert torch.equal(words(pool[:, [0, 2]]), words(digest[:, [0, 2]]))
    for pool in built(layers, [], impl):
        assert (pool == 99).all()


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
    digests = digests_of(keys(seed, P, H, D, torch.bfloat16))
    q = torch.randn(B, H * G, D, generator=rng)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    out = torch.full((B, N), torch.nan)
    arguments = (q, digests, table, n_full, D**-0.5, reduce)
    got = score_pages_int8(*arguments, impl=impl, out=out)
    assert got is out
    low, low_step, high, high_step = digests
    values = decode(low, low_step).double(), decode(high, high_step).double()
    expected = score_reference(q, *values, table, n_full, D**-0.5, reduce)
    agree(SCORE_PAGES_INT8, got, expected)


@SCORERS
@given(outliers=st.booleans(), spread=st.sampled_from((0.1, 1.0, 20.0)), seed=st.integers(0, 2**31))
def test_a_bound_stays_a_bound(impl, outliers, spread, seed):
    """For every query: at least the bound of the bfloat16 digests, so at least every q.k."""
    P, H, G, D = 6, 2, 3, 64
    k = keys(seed, P, H, D, torch.bfloat16, outliers=outliers)
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(1, H * G, D, generator=rng) * spread
    table, n_full = torch.arange(P, dtype=torch.int32)[None], torch.tensor([P], dtype=torch.int32)
    exact = score_reference(q, *digest_reference(k), table, n_full, 1.0, "sum")
    loose = score_pages_int8(q, digests_of(k), table, n_full, 1.0, "sum", impl=impl)
    assert (loose >= exact - 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("outliers", [False, True])
def test_selection_holds(outliers):
    """Of 64 pages of 1,024 at least 60 are those of the bfloat16 digests, on random keys."""
    H, G, D, P = 4, 4, 128, 1024
    k = keys(5, P, H, D, torch.bfloat16, outliers=outliers)
    q = torch.randn(4, H * G, D, generator=torch.Generator().manual_seed(6))
    table = torch.arange(P, dtype=torch.int32).repeat(4, 1)
    n_full = torch.full((4,), P, dtype=torch.int32)
    exact = score_reference(q, *digest_reference(k), table, n_full, D**-0.5)
    loose = score_pages_int8(q, digests_of(k), table, n_full, D**-0.5)
    chosen = [set(row) for row in exact.topk(64).indices.tolist()]
    for row, want in zip(loose.topk(64).indices.tolist(), chosen, strict=True):
        assert len(set(row) & want) >= 60


@SCORERS
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_page_without_a_step_scores_nan(impl, reduce):
    k = keys(3, 4, 1, 64, torch.float32)
    k[2, 0, 0, 5] = torch.inf
    table, n_full = torch.arange(4, dtype=torch.int32)[None], torch.tensor([4], dtype=torch.int32)
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(4))
    scores = score_pages_int8(q, digests_of(k), table, n_full, 0.125, reduce, impl=impl)
    assert scores[0, 2].isnan()


@pytest.mark.parametrize("impl", ["triton"])
def test_triton_skips_pages_out_of_range(impl):
    k, into = keys(2, 2, 1, 32, torch.float32), pools(1, 2, 1, 32)
    ids = torch.tensor([2, -1, 2**40])
    source = LayerPages.of([k], [k], "cpu")
    build_layer_digests_int8(source, ids, into, impl=impl)
    rows = torch.tensor([[2, -1]])
    build_layer_digests_int8(source, torch.tensor([0, 1]), into, rows, impl=impl)
    assert all((pool == 99).all() for pool in into)


def test_native_refuses_pages_out_of_range():
    k, into = keys(2, 2, 1, 32, torch.float32), pools(1, 2, 1, 32)
    source = LayerPages.of([k], [k], "cpu")
    with pytest.raises(
        ValueError, match=r"build_layer_digests_int8: ids has 2, expected values in"
    ):
        build_layer_digests_int8(source, torch.tensor([0, 2]), into, impl="native")
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="score_pages_int8: table has 2, expected values below 2"):
        score_pages_int8(
            torch.zeros(1, 1, 32),
            Int8Digests(*(x[0] for x in into)),
            2 * one[None],
            one,
            1.0,
            impl="native",
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": torch.zeros(1, 2, 1, 32)}, "low has dtype torch.float32, expected torch.int8"),
        ({"low_step": torch.zeros(1, 2, 1, 2).bfloat16()}, "low_step has C=2, expected 1"),
        ({"high_step": torch.zeros(1, 2, 1, 1)}, "high_step has dtype torch.float32"),
        ({"high": torch.zeros(1, 2, 1, 16).char()}, "high has D=16, expected 32"),
        ({"high": torch.zeros(2, 2, 1, 32).char()}, "high has L=2, expected 1"),
    ],
)
def test_malformed_arguments_are_named(change, message):
    k = torch.zeros(2, 8, 1, 32)
    digests = pools(1, 2, 1, 32)._replace(**change)
    with pytest.raises(ValueError, match=f"build_layer_digests_int8: {message}"):
        build_layer_digests_int8(LayerPages.of([k], [k], "cpu"), torch.tensor([0]), digests)


def test_head_sizes_that_groups_do_not_divide_are_refused():
    narrow, wide = torch.zeros(2, 8, 1, 48), torch.zeros(2, 8, 1, 512)
    with pytest.raises(ValueError, match="low has D=48, expected a multiple of 32"):
        build_layer_digests_int8(
            LayerPages.of([narrow], [narrow], "cpu"), torch.tensor([0]), pools(1, 2, 1, 48)
        )
    with pytest.raises(
        ImplementationError, match="D=512; triton supports multiples of 16 up to 256"
    ):
        built([wide], impl="triton")
