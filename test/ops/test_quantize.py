"""Quantising pages to int8: exact agreement of the implementations, and the stated error."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.quantize import (
    MAX_ERROR_STEPS,
    QUANTIZE_PAGES,
    dequantize_pages,
    order_codes,
    plain_codes,
    quantize_pages,
    quantize_pages_reference,
    room_for,
)

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantized(pages, impl="native"):
    """All pages as K, and reversed ones as V, into poisoned rows; codes [n, S, H, D] and scales of K."""
    n, S, H, D = pages.shape
    codes, scales = room_for(n, S, H, D)
    codes.fill_(99), scales.fill_(math.inf)
    every = torch.arange(n)
    quantize_pages(pages, pages.flip(0).contiguous(), every, codes, scales, every, impl=impl)
    k, v = plain_codes(codes, S, D)
    assert torch.equal(codes, order_codes(k, v)), "zeros where there is no token"
    assert torch.equal(k, v.flip(0))
    k_scale, v_scale = scales.unbind(1)
    torch.testing.assert_close(k_scale, v_scale.flip(0), rtol=0, atol=0, equal_nan=True)
    return k, k_scale


@pytest.mark.parametrize("S", [1, 7, 16, 32, 33])
def test_codes_lie_as_the_documentation_says(S):
    k, v = torch.randint(-128, 128, (2, 2, S, 3, 32), dtype=torch.int8)
    codes = order_codes(k, v)
    blocks = -(-S // 16)
    assert codes.shape == (2, 3, 2, 16 * blocks * 32)
    keys, values = codes[:, :, 0].view(2, 3, blocks, 8, 16, 4), codes[:, :, 1].view(2, 3, -1, 32, 4)
    place = [0, 2, 1, 3]
    for p, t, h, d in itertools.product(range(2), range(S), range(3), range(32)):
        assert keys[p, h, t // 16, d // 4, t % 16, place[d % 4]] == k[p, t, h, d]
        assert values[p, h, t // 4, d, place[t % 4]] == v[p, t, h, d]
    again = plain_codes(codes, S, 32)
    assert torch.equal(again[0], k) and torch.equal(again[1], v)
    padded = plain_codes(codes, 16 * blocks, 32)
    assert not padded[0][:, S:].any() and not padded[1][:, S:].any()


@given(
    dtype=st.sampled_from(DTYPES),
    D=st.sampled_from([16, 48, 64, 96, 128, 256]),
    S=st.integers(1, 70),
    H=st.integers(1, 4),
    exponent=st.integers(-12, 2),
    seed=st.integers(0, 2**31),
)
def test_native_equals_the_reference_and_keeps_its_error(dtype, D, S, H, exponent, seed):
    torch.manual_seed(seed)
    pages = (torch.randn(3, S, H, D) * 10.0**exponent).to(dtype)
    pages[0, seed % S] *= 50
    codes, scale = quantized(pages)
    expected = quantize_pages_reference(pages)
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])
    assert codes.min() >= -127
    error = (dequantize_pages(codes, scale).double() - pages.double()).abs()
    assert (error <= MAX_ERROR_STEPS * scale[:, None, :, None].double()).all()
    largest = codes.abs().amax((1, 3))
    assert torch.equal(largest == 127, scale > 0)  # the range is used, unless there is none


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_heads_than_are_walked_at_once(dtype):
    torch.manual_seed(1)
    pages = (torch.randn(3, 5, 130, 32) * torch.logspace(-4, 2, 130)[:, None]).to(dtype)
    codes, scale = quantized(pages)
    expected = quantize_pages_reference(pages)
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_comes_back(dtype):
    """Integers up to 127 are their own codes, in their places, with scale 1."""
    pages = (torch.arange(2 * 2 * 8 * 64) % 255 - 127).view(2, 2, 8, 64).to(dtype)
    pages = pages.transpose(1, 2).contiguous()  # every head has all of them
    codes, scale = quantized(pages)
    assert torch.equal(codes.to(dtype), pages)
    assert torch.equal(scale, torch.ones(2, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_and_next_to_nothing(dtype):
    pages = torch.zeros(3, 16, 2, 64, dtype=dtype)
    pages[1] *= -1
    if dtype != torch.float16:
        pages[2] = 2.0**-120
    codes, scale = quantized(pages)
    assert not codes.any()
    assert torch.equal(scale, torch.zeros(3, 2))


def test_one_huge_value_hides_the_rest_of_its_page_and_head_only():
    pages = torch.randn(2, 16, 2, 64)
    pages[1, 3, 0, 5] = 3e38
    codes, scale = quantized(pages)
    assert codes[1, 3, 0, 5] == 127 and codes[1, :, 0].abs().sum() == 127
    assert scale[1, 0] == torch.tensor(3e38) / 127
    assert (scale[0] < 0.1).all() and scale[1, 1] < 0.1
    assert dequantize_pages(codes, scale).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("channel", [0, 1, 63])
def test_values_that_are_not_finite_show_in_the_scale(dtype, wrong, channel):
    pages = torch.randn(2, 5, 2, 64).to(dtype)
    pages[1, 2, 1, channel] = wrong
    codes, scale = quantized(pages)
    assert scale[1, 1].isnan() and not codes[1, :, 1].any()
    assert scale[0].isfinite().all() and scale[1, 0].isfinite()
    expected = quantize_pages_reference(pages)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale.isnan(), expected[1].isnan())


@pytest.mark.parametrize("impl", QUANTIZE_PAGES.names())
def test_only_the_named_rows_are_written(impl):
    k, v = torch.randn(2, 5, 8, 2, 64)
    codes, scales = room_for(4, 8, 2, 64)
    codes.fill_(99), scales.fill_(-1)
    src_ids, dst_ids = torch.tensor([4, 0, 4]), torch.tensor([1, 3, 0])
    quantize_pages(k, v, src_ids[:0], codes, scales, dst_ids[:0], impl=impl)
    assert (codes == 99).all() and (scales == -1).all()
    quantize_pages(k, v, src_ids, codes, scales, dst_ids, impl=impl)
    (k, k_scale), (v, v_scale) = (quantize_pages_reference(x[src_ids]) for x in (k, v))
    assert torch.equal(codes[dst_ids], order_codes(k, v))
    assert torch.equal(scales[dst_ids], torch.stack((k_scale, v_scale), 1))
    assert (codes[2] == 99).all() and (scales[2] == -1).all()


def test_arguments_are_checked():
    k = torch.randn(2, 8, 2, 64)
    codes, scales = room_for(3, 8, 2, 64)
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="k has dtype torch.float64"):
        quantize_pages(k.double(), k.double(), one, codes, scales, one)
    with pytest.raises(ValueError, match="v has dtype torch.bfloat16"):
        quantize_pages(k, k.bfloat16(), one, codes, scales, one)
    with pytest.raises(ValueError, match="codes has dtype torch.uint8"):
        quantize_pages(k, k, one, codes.to(torch.uint8), scales, one)
    with pytest.raises(ValueError, match="codes has c=1024, expected 2048"):
        longer = torch.randn(2, 17, 2, 64)
        quantize_pages(longer, longer, one, codes, scales, one)
    with pytest.raises(ValueError, match="scales has H=1, expected 2"):
        quantize_pages(k, k, one, codes, scales[..., :1], one)
    with pytest.raises(ValueError, match="quantize_pages: src_ids has 2"):
        quantize_pages(k, k, torch.tensor([2]), codes, scales, one, impl="native")
    with pytest.raises(ValueError, match="quantize_pages: dst_ids has -1"):
        quantize_pages(k, k, one, codes, scales, torch.tensor([-1]), impl="native")
    for dim in (24, 528):
        wide = torch.randn(2, 8, 2, dim)
        with pytest.raises(ImplementationError, match=f"D={dim}"):
            quantize_pages(wide, wide, one, *room_for(1, 8, 2, dim), one, impl="native")
