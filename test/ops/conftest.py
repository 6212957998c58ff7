"""Fixtures of the op tests, and the device.

On a machine with a CUDA device the cases of "triton" run there: their tensors are created on the CPU
as for every implementation; arguments are copied to the device, results and mutated arguments back.
"""

import importlib
import pkgutil

import pytest
import torch
from hypothesis import settings

from sglang_scout import ops
from sglang_scout.ops import native, triton
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.op import Implementation, Op

# The interpreter is a hundred times slower than the C++ code, and on a device each new size of an
# axis that is a constant of the kernel takes a second to compile.
TRITON_SHARE = 0.25

HAS_TRITON = triton.interpreted() or torch.cuda.is_available()


def runs_triton(item):
    return hasattr(item, "callspec") and item.callspec.params.get("impl") == "triton"


def pytest_runtest_setup(item):
    if runs_triton(item) and not HAS_TRITON:
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


def plane(values, shift=0, **where):
    """A copy of ``values``, ``shift`` elements after the start of its memory."""
    memory = torch.empty(shift + values.numel(), dtype=values.dtype, **where)
    return memory[shift:].view(values.shape).copy_(values)


class Travelling(Implementation):
    def reaches(self, name, tensor):
        return True


def travelling(implementation: Implementation) -> Implementation:
    """The same implementation on the CUDA device, for arguments on the CPU."""

    def over(value, move):
        if isinstance(value, tuple):
            values = [over(v, move) for v in value]
            return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
        return move(value)

    def run(*args):
        there = {}  # of each tensor by identity: as it was, and on the device

        def go(value):
            if isinstance(value, torch.Tensor):
                return there.setdefault(id(value), (value, value.to("cuda")))[1]
            if isinstance(value, LayerPages):  # pinned, like an arena's; no op changes them
                halves = (
                    [plane(x, x.storage_offset(), pin_memory=True) for x in half]
                    for half in (value.k, value.v)
                )
                return LayerPages.of(*halves, "cuda")
            return value

        def come(value):
            if not isinstance(value, torch.Tensor):
                return value
            return next((old for old, new in there.values() if new is value), value.cpu())

        result = implementation.run(*over(args, go))
        for old, new in there.values():
            old.copy_(new)
        return over(result, come)

    return Travelling(**vars(implementation) | {"run": run})


def pytest_configure(config):
    # The interpreter is numpy: it warns of every inf - inf, even if masked afterwards.
    for kind in ("DeprecationWarning", "RuntimeWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}:triton.runtime.interpreter")
    if not torch.cuda.is_available() or triton.interpreted():
        return
    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    for op in Op.every:
        if "triton" in op.implementations:
            op.implementations["triton"] = travelling(op.implementations["triton"])


@pytest.fixture(params=["avx2", "avx512", "avx512bf16"])
def isa(request):
    """Parametrises tests of "native" with every instruction set of this machine."""
    impl = request.node.callspec.params.get("impl", "native")
    if impl != "native" and request.param != "avx2":
        pytest.skip(f"{impl} has no instruction sets: once is enough")
    before = native.module.isa()
    try:
        native.module.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    native.module.set_isa(before)


@pytest.fixture(scope="session")
def layer_pages():
    """layer_pages(k, v=None, shift=0): [L, P, ...] as separately allocated layers; V is K without ``v``."""

    def make(k, v=None, shift=0):
        halves = ([plane(x, shift) for x in half] for half in (k, k if v is None else v))
        return LayerPages.of(*halves, "cpu")

    return make


@pytest.fixture
def arena(request):
    """An arena, with one NUMA node and one list per request unless parametrised."""
    import ring_cases

    with ring_cases.arena_of(*getattr(request, "param", ())) as made:
        yield made
