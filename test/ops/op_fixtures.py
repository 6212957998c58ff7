"""Fixtures of the op tests; implementations.py says what runs on a device."""

import pytest
import torch
from hypothesis import settings

from implementations import chosen, plane
from sglang_scout import _native
from sglang_scout.ops import triton
from sglang_scout.ops.pages import LayerPages

# The interpreter is a hundred times slower than the C++ code, and on a device each new size of an
# axis that is a constant of the kernel takes a second to compile.
TRITON_SHARE = 0.25


def runs_triton(item):
    return hasattr(item, "callspec") and chosen(item.callspec.params) == "triton"


def pytest_runtest_setup(item):
    if runs_triton(item) and not (triton.interpreted() or torch.cuda.is_available()):
        pytest.skip("no CUDA device, TRITON_INTERPRET is not set")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fewer generated examples for the kernels."""
    test = getattr(item, "obj", None)
    usual = getattr(test, "_hypothesis_internal_use_settings", None)
    if usual is None or not runs_triton(item):
        return (yield)
    fewer = max(1, int(TRITON_SHARE * usual.max_examples))
    test._hypothesis_internal_use_settings = settings(usual, max_examples=fewer)
    try:
        return (yield)
    finally:
        test._hypothesis_internal_use_settings = usual


def pytest_configure(config):
    # The interpreter is numpy: it warns of every inf - inf, even if masked afterwards.
    for kind in ("DeprecationWarning", "RuntimeWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}:triton.runtime.interpreter")


@pytest.fixture(params=["avx2", "avx512", "avx512bf16"])
def isa(request):
    """Parametrises tests of C++ with every instruction set of this machine."""
    impl = chosen(request.node.callspec.params)
    if impl not in ("native", "") and request.param != "avx2":
        pytest.skip(f"{impl} has no instruction sets: once is enough")
    before = _native.isa()
    try:
        _native.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    _native.set_isa(before)


@pytest.fixture(scope="session")
def layer_pages():
    """layer_pages(k, v=None, shift=0): [L, P, ...] as separately allocated layers; V is K without ``v``."""

    def make(k, v=None, shift=0):
        halves = ([plane(x, shift) for x in half] for half in (k, k if v is None else v))
        return LayerPages.of(*halves, "cpu")

    return make
