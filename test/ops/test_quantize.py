"""Quantising pages to int8: exact agreement of the implementations, and the stated error."""

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
    quantize_pages,
    quantize_pages_reference,
)

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantized(pages, impl="native"):
    """All pages, into poisoned rows."""
    codes = torch.full(pages.shape, 99, dtype=torch.int8)
    scale = torch.full((pages.shape[0], pages.shape[2]), math.inf)
    every = torch.arange(pages.shape[0])
    quantize_pages(pages, every, codes, scale, every, impl=impl)
    return codes, scale


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
    src = torch.randn(5, 8, 2, 64)
    codes = torch.full((4, 8, 2, 64), 99, dtype=torch.int8)
    scale = torch.full((4, 2), -1.0)
    src_ids, dst_ids = torch.tensor([4, 0, 4]), torch.tensor([1, 3, 0])
    quantize_pages(src, src_ids[:0], codes, scale, dst_ids[:0], impl=impl)
    assert (codes == 99).all() and (scale == -1).all()
    quantize_pages(src, src_ids, codes, scale, dst_ids, impl=impl)
    expected = quantize_pages_reference(src[src_ids])
    assert torch.equal(codes[dst_ids], expected[0]) and torch.equal(scale[dst_ids], expected[1])
    assert (codes[2] == 99).all() and (scale[2] == -1).all()


def test_arguments_are_checked():
    src, codes = torch.randn(2, 8, 2, 64), torch.zeros(3, 8, 2, 64, dtype=torch.int8)
    scale, one = torch.zeros(3, 2), torch.tensor([0])
    with pytest.raises(ValueError, match="src has dtype torch.float64"):
        quantize_pages(src.double(), one, codes, scale, one)
    with pytest.raises(ValueError, match="codes has dtype torch.uint8"):
        quantize_pages(src, one, codes.to(torch.uint8), scale, one)
    with pytest.raises(ValueError, match="scale has H=1, expected 2"):
        quantize_pages(src, one, codes, scale[:, :1], one)
    with pytest.raises(ValueError, match="quantize_pages: src_ids has 2"):
        quantize_pages(src, torch.tensor([2]), codes, scale, one, impl="native")
    with pytest.raises(ValueError, match="quantize_pages: dst_ids has -1"):
        quantize_pages(src, one, codes, scale, torch.tensor([-1]), impl="native")
    with pytest.raises(ImplementationError, match="D=24"):
        quantize_pages(
            torch.randn(2, 8, 2, 24), one, codes[..., :24].contiguous(), scale, one, impl="native"
        )
