"""Rotated page digests: what is built, and scores by it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import (
    FIRST,
    LARGEST,
    _unpacked,
    build_layer_rotated,
    planes_shape,
    rotate,
    score_rotated,
)
from sglang_scout.ops.score import REDUCTIONS

BUILDS = pytest.mark.parametrize("impl", build_layer_rotated.names())
SCORES = pytest.mark.parametrize("impl", score_rotated.names())
HEAD_DIMS = st.sampled_from((16, 48, 64, 80, 128, 256))
BITS = st.integers(1, 2)


def keys(seed, L, R, H, D, dtype=torch.float32):
    """About a mean that is larger than what they differ by, some channels larger than others."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.rand(H, D, generator=rng) * 4
    mean = torch.randn(L, R, 1, H, D, generator=rng) * size
    return (mean + torch.randn(L, R, 32, H, D, generator=rng)).to(dtype)


def digests(k, ids, bits, P, rows=None, impl="reference"):
    """planes, stats of [L, R, 32, H, D]; bytes that nothing wrote are 77."""
    L, _, _, H, D = k.shape
    planes = torch.full((L, P, H, *planes_shape(bits, D)), 77, dtype=torch.uint8)
    stats = torch.full((L, P, H, D + 80), 77, dtype=torch.uint8)
    build_layer_rotated(LayerPages.of([*k], [*k], "cpu"), ids, planes, stats, rows, impl=impl)
    return planes, stats


def stored(stats, D):
    """m, s and the step, float32."""
    scale = stats[..., D : D + 64].contiguous().view(torch.bfloat16)
    step = stats[..., D + 64 : D + 68].contiguous().view(torch.float32)
    return stats[..., :D].view(torch.int8).float(), scale.float(), step


@BUILDS
@given(
    seed=st.integers(0, 99),
    H=st.integers(1, 3),
    D=HEAD_DIMS,
    bits=BITS,
    with_rows=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
def test_built_digests(impl, seed, H, D, bits, with_rows, dtype):
    """Each number as what was stored before it says, so that a rounding is not seen in all that follows."""
    k, ids = keys(seed, 2, 6, H, D, dtype), torch.tensor([4, 1, 5])
    rows = torch.tensor([[0, 3, 2], [5, 1, 4]]) if with_rows else None
    planes, stats = digests(k, ids, bits, 6, rows, impl)
    assert (planes[:, [0, 2, 3]] == 77).all() and (stats[:, [0, 2, 3]] == 77).all()
    assert (stats[:, ids, :, D + 68 :] == 0).all()
    read = rows if with_rows else ids.expand(2, -1)
    for layer in range(2):
        x = rotate(k[layer, read[layer]].float().transpose(1, 2))  # [3, H, 32, D]
        mean, scale, step = stored(stats[layer, ids], D)
        torch.testing.assert_close(step[..., 0], x.mean(2).abs().amax(-1) / 127, rtol=1e-5, atol=0)
        assert ((mean * step - x.mean(2)).abs() <= 0.501 * step).all()
        x = x - (mean * step)[:, :, None]
        s = x.square().mean(-1).sqrt()
        torch.testing.assert_close(scale, s, rtol=2**-8, atol=0)  # bfloat16, to the nearest
        bit = _unpacked(planes[layer, ids]) > 0  # [3, H, bits, 32, D]
        unsure = 1e-5 * s[..., None] + 1e-6 * step[:, :, None] * 127
        assert ((bit[:, :, 0] == (x >= 0)) | (x.abs() < unsure)).all()
        if bits == 2:
            outer = x.abs() - FIRST * s[..., None]
            same = bit[:, :, 1] == (bit[:, :, 0] == (outer > 0))
            assert (same | (outer.abs() < unsure)).all()


@BUILDS
def test_keys_that_are_no_numbers(impl):
    k = keys(0, 1, 3, 1, 64)
    k[0, 0, 3, 0, 5], k[0, 1, 4, 0, 6], k[0, 2] = torch.nan, -torch.inf, 0.0
    planes, stats = digests(k, torch.arange(3), 2, 3, impl=impl)
    k = k.nan_to_num(0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)
    wanted = digests(k, torch.arange(3), 2, 3)[1]
    for got, want in zip(stored(stats, 64), stored(wanted, 64), strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1)
    assert (stats[0, 2, 0, :128] == 0).all() and (planes[0, 2] == 255)[:, 0].all()


def score_inputs(seed, B, N, P, H, G, D, bits):
    rng = torch.Generator().manual_seed(seed)
    planes, stats = digests(keys(seed, 1, P, H, D), torch.arange(P), bits, P)
    q = torch.randn(B, H * G, D, generator=rng) * torch.rand(H * G, 1, generator=rng) * 4
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return q, planes[0], stats[0], table, n_full, D**-0.5


@SCORES
@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    reduce=st.sampled_from(REDUCTIONS),
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 90, 12, 2, 9))),
    D=HEAD_DIMS,
    bits=BITS,
)
def test_scores(impl, agree, reduce, seed, sizes, D, bits):
    inputs = score_inputs(seed, *sizes, D, bits)
    got = score_rotated(*inputs, reduce, impl=impl)
    wanted = score_rotated.reference(*inputs, reduce)
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    agree(score_rotated, got.nan_to_num(neginf=-9.0), wanted.nan_to_num(neginf=-9.0))


@SCORES
def test_scores_of_large_and_zero_queries_and_keys(impl, agree):
    q, planes, stats, table, n_full, scale = score_inputs(3, 3, 40, 12, 2, 3, 64, 2)
    k = keys(3, 1, 12, 2, 64)
    k[0, 0], k[0, 1] = torch.inf, 0.0
    planes, stats = (x[0] for x in digests(k, torch.arange(12), 2, 12))
    q[0], q[1, :2], n_full[:] = 0.0, q[1, :2] * 1e20, 40
    inputs = q, planes, stats, table, n_full, scale
    agree(score_rotated, score_rotated(*inputs, impl=impl), score_rotated.reference(*inputs))
