"""Rotated digests: stored contents, and page scores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from implementations import implementations
from score_cases import DIMS, DTYPES, inputs, literal, masses, rotated_digests, scores
from sglang_scout.ops import rotated
from sglang_scout.ops.pages import LARGEST
from sglang_scout.ops.rotated import mass_change_rotated, rotate, score_rotated

pytestmark = pytest.mark.usefixtures("isa")
BUILDS = implementations(rotated.build_layer_rotated)
SCORES = implementations(score_rotated)
CHANGES = implementations(mass_change_rotated)


def keys(seed, P, H, D, dtype=torch.float32):
    """With a mean, and some channels far larger than others."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.where(torch.rand(D, generator=rng) < 0.1, 8.0, 1.0)
    k = torch.randn(P, 32, H, D, generator=rng) + 2 * torch.randn(P, 1, H, D, generator=rng)
    return (k * size).to(dtype)


def check_norms(v, stats):
    """Accurate to half a step of the largest."""
    expected = v.double().nan_to_num(0.0).clamp(-LARGEST, LARGEST).norm(dim=-1)
    found = rotated.value_norms(stats).double()
    error = (found - expected.transpose(1, 2)).abs()
    assert (error <= 0.502 / 255 * found.amax(-1, keepdim=True) + 1e-30).all()
    assert not stats[..., -8:].any()


def check_built(k, built):
    """Against the formula in float64: within one quantization step, and equal bits except close to a threshold."""
    planes, stats = built
    D = k.shape[-1]
    x = k.double().nan_to_num(0.0).clamp(-LARGEST, LARGEST).transpose(1, 2)
    x = x @ rotated._rotation(D, x.device).double()
    step = stats[..., D + 64 : D + 68].contiguous().view(torch.float32).double()
    mean = stats[..., :D].contiguous().view(torch.int8).double()
    expected = x.mean(2)
    torch.testing.assert_close(
        step, (expected.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126), atol=0, rtol=1e-4
    )
    assert ((mean - expected / step).abs() <= 0.51 + 1e-4 * mean.abs()).all()
    x = x - (mean * step)[:, :, None]
    scale = x.square().mean(-1).sqrt()
    stored = stats[..., D : D + 64].contiguous().view(torch.bfloat16).double()
    torch.testing.assert_close(stored, scale, atol=1e-30, rtol=2.0**-8)
    # Rounding of the rotation is relative to the keys.
    largest = x.abs().amax((-1, -2), keepdim=True)
    close = 1e-5 * scale[..., None] + 2e-6 * (largest + k.double().nan_to_num(0.0).abs().max())
    found = rotated._unpacked(planes)
    assert ((found[:, :, 0] > 0) == (x >= 0))[x.abs() > close].all()
    margin = x.abs() - rotated.FIRST * scale[..., None]
    outside = found[:, :, 1] == found[:, :, 0]
    assert (outside == (margin > 0))[margin.abs() > close].all()


@BUILDS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (6, 3))),
    D=st.sampled_from(DIMS),
    seed=st.integers(0, 99),
)
def test_pages_are_as_the_formula_says(impl, dtype, sizes, D, seed):
    k, v = keys(seed, *sizes, D, dtype), keys(seed + 1, *sizes, D, dtype)
    built = rotated_digests(k, v, impl)
    check_built(k, built)
    check_norms(v, built[1])


@BUILDS
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, math.inf, -math.inf, math.nan])
def test_pages_of_one_value_and_single_bad_elements(impl, value):
    k = keys(1, 3, 2, 64)
    k[0] = value
    k[1, 5, 0, 9] = value
    k[2, 7] = value
    built = rotated_digests(k, k, impl)
    decoded = rotated.decode(*built)
    assert decoded.isfinite().all()
    if math.isfinite(value):
        same = rotate(k[0].transpose(0, 1))
        assert (decoded[0] - same).abs().max() <= 0.02 * abs(value) * 64**0.5
        check_built(k, built)
    check_norms(k, built[1])


@BUILDS
def test_keys_are_decoded_as_well_as_their_bits_allow(impl):
    """The levels' squared error for a normal variable is 0.118 of its variance."""
    k = torch.randn(50, 32, 1, 128, generator=torch.Generator().manual_seed(3))
    error = rotated.decode(*rotated_digests(k, k, impl)) - rotate(k.transpose(1, 2))
    assert 0.9 < error.square().mean() / 0.118 < 1.05


@CHANGES
@settings(max_examples=8)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 70, 12, 2, 4))),
    D=st.sampled_from(DIMS),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    per_head=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_change_of_a_mass_equals_the_formula(agree, impl, sizes, D, dtype, per_head, seed):
    """With a list per KV head, of its own pages."""
    B, N, P, H, G = sizes
    lists = H if per_head else 1
    q, digests, pages, n_pages = inputs("rotated-2", seed, B * lists, N, P, H, G, D)
    q = q[:B].to(dtype)
    q_ahead = q + 0.3 * torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    expected = torch.zeros(B, lists, H * G // lists, dtype=torch.float64)
    for row, ids in enumerate(pages):
        ids = ids[: n_pages[row]][ids[: n_pages[row]] >= 0].long()
        b, head = divmod(row, lists)
        if len(ids):
            of_row = (masses("rotated-2", x[b].double(), digests, ids)[0] for x in (q, q_ahead))
            real, ahead = (u.logsumexp(1).view(lists, -1)[head] for u in of_row)
            expected[b, head] = real - ahead
    expected = expected.flatten(1)
    got = impl(q, q_ahead, *digests, pages, n_pages, D**-0.5)
    assert (got[expected == 0] == 0).all()
    agree(mass_change_rotated, got, expected, times=2.0)


@SCORES
@settings(max_examples=8)
@given(
    seed=st.integers(0, 99),
    exponents=st.lists(st.integers(-8, 4), min_size=64, max_size=64),
    size=st.sampled_from((1e-6, 1.0, 30.0)),
)
def test_channels_of_very_different_size(agree, impl, seed, exponents, size):
    """Errors are relative to the norms of query and key, of which the latter is about 11 here."""
    q, *rest = inputs("rotated-2", seed)
    q = size * q * 2.0 ** torch.tensor(exponents, dtype=torch.float32)
    got = scores("rotated-2", q, *rest, impl)
    logits = float(q.norm(dim=-1).max()) * 11 * 0.125
    agree(score_rotated, got, literal("rotated-2", q, *rest), times=max(1.0, logits / 11))


@SCORES
@pytest.mark.parametrize("fill", [0.0, 1.0, math.inf, math.nan])
def test_one_page_and_pages_of_one_value(impl, fill):
    k = torch.full((3, 32, 2, 32), fill)
    q = torch.randn(2, 4, 32)
    table = torch.tensor([[1, -1, -1], [0, 1, 2]], dtype=torch.int32)
    n_full = torch.tensor([3, 3], dtype=torch.int32)
    one = torch.full_like(k, 32**-0.5)
    got = scores("rotated-2", q, rotated_digests(k, one), table, n_full, impl)
    expected = torch.tensor([[4, -math.inf, -math.inf], [4 / 3] * 3])
    torch.testing.assert_close(got, expected)
