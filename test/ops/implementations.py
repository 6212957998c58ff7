"""The implementations of an op as parameters of tests, and the device.

On a machine with a CUDA device the kernels run there: tensors are created on the CPU as for every implementation;
arguments are copied to the device, results and mutated arguments back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_map

import op_calls
from sglang_scout.ops import triton
from sglang_scout.ops.pages import LayerPages

ON_DEVICE = torch.cuda.is_available() and not triton.interpreted()


def name_of(implementation: Callable) -> str:
    """native, triton or reference."""
    module = implementation.__module__
    if module.startswith("sglang_scout.ops.triton.") or module.endswith(".kernels"):
        return "triton"
    return "native" if implementation.__name__.endswith("_native") else "reference"


KINDS = "native", "triton", "reference"


def implementation(op: Callable, kind: str) -> Callable | None:
    """The op's C++ function, its kernel or its reference, if there is one."""
    if kind == "triton":
        return op_calls.kernels().get(op.__name__)
    name = f"_{op.__name__}_native" if kind == "native" else f"{op.__name__}_reference"
    return getattr(sys.modules[op.__module__], name, None)


def implementations(
    *ops: Callable, only: tuple[str, ...] = KINDS, also: str = ""
) -> pytest.MarkDecorator:
    """Parametrises a test with the implementations of ops as ``impl``; or of the last items of tuples, ``also`` naming
    the others before it."""
    values = []
    for row in ops:
        *before, op = row if isinstance(row, tuple) else (row,)
        names = [getattr(x, "__name__", x) for x in before]
        for kind in only:
            if function := implementation(op, kind):
                values.append(pytest.param(*before, usable(function), id="-".join([*names, kind])))
    return pytest.mark.parametrize(f"{also},impl".strip(","), values)


def usable(implementation: Callable) -> Callable:
    """The function itself, or for kernels on a device one that takes and returns tensors on the CPU."""
    if name_of(implementation) != "triton" or not ON_DEVICE:
        return implementation

    @functools.wraps(implementation)
    def run(*args, **kwargs):
        there = {}  # of each tensor by identity: as it was, and on the device

        def go(value):
            if isinstance(value, torch.Tensor):
                return there.setdefault(id(value), (value, value.to("cuda")))[1]
            if isinstance(value, LayerPages):  # pinned, like an arena's; no kernel changes them
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

        args, kwargs = tree_map(go, (args, kwargs))
        result = implementation(*args, **kwargs)
        for old, new in there.values():
            old.copy_(new)
        return tree_map(come, result)

    return run


def plane(values: torch.Tensor, shift: int = 0, **where) -> torch.Tensor:
    """A copy of ``values``, ``shift`` elements after the start of its memory."""
    memory = torch.empty(shift + values.numel(), dtype=values.dtype, **where)
    return memory[shift:].view(values.shape).copy_(values)


def chosen(parameters: dict) -> str:
    """The name of the implementation among a test's parameters, or ""."""
    impl = parameters.get("impl")
    return name_of(impl) if callable(impl) else ""
