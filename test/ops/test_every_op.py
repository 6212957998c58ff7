"""Invariants of every op: wrong tensors are refused, inputs are unchanged, shapes never depend on values."""

import functools
import inspect
import sys
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

from op_calls import of_policies
from sglang_scout.ops import triton
from sglang_scout.ops.attend import attend_pages, merge_states
from sglang_scout.ops.minmax import build_layer_digests, score_pages
from sglang_scout.ops.pages import (
    LayerPages,
    Pool,
    append_tokens,
    copy_layer_pages,
    copy_tokens,
    stage_pages,
)
from sglang_scout.ops.predict import add_norm, rotate_heads
from sglang_scout.ops.rotated import (
    STATS_BYTES,
    build_layer_rotated,
    mass_change_rotated,
    planes_shape,
    score_rotated,
)
from sglang_scout.ops.select import select_pages

L, B, P, S, H, HQ, D, N, C = 2, 3, 7, 32, 2, 4, 16, 5, 24


def real(*shape):
    return torch.rand(shape) + 0.5


def ints(*shape, dtype=torch.int32):
    return torch.ones(shape, dtype=dtype)


def cases():
    """Op -> valid arguments."""
    layers = LayerPages.of(*[[real(P, S, H, D) for _ in range(L)] for _ in "kv"], "cpu")
    of_one_head = LayerPages.of(*[[real(P, S, D) for _ in range(L)] for _ in "kv"], "cpu")
    ids, slots = torch.arange(4), [real(L, 4, S, H, D) for _ in "kv"]
    of_pages, of_layers = [real(P, H, D) for _ in "ab"], [real(L, P, H, D) for _ in "ab"]
    q, table, n_full = real(B, HQ, D), ints(B, N), ints(B)
    pools = [Pool(real(n, S, H, D), real(n, S, H, D), torch.arange(B).int()) for n in (P, P + 1)]
    codes = [
        torch.zeros(P, H, *x, dtype=torch.uint8) for x in (planes_shape(D), (D + STATS_BYTES,))
    ]
    return {
        add_norm: (real(B, C), real(B, C), real(C), 1e-6),
        append_tokens: (real(B, H, D), real(B, H, D), n_full, *pools),
        attend_pages: (q, *slots_of(P), table, n_full, n_full, 0.1, ints(9), n_full),
        build_layer_digests: (layers, ids, *of_layers),
        build_layer_rotated: (layers, ids, *(x.expand(L, *x.shape).clone() for x in codes)),
        copy_layer_pages: (layers, torch.stack([ids % L, ids, ids]), *slots),
        copy_tokens: (layers, torch.stack([ids % L, ids, ids]).sort(1)[0], of_one_head),
        mass_change_rotated: (q, q, *codes, table, n_full, 0.1),
        merge_states: (real(B, HQ, D), real(B, HQ), real(B, HQ, D), real(B, HQ)),
        rotate_heads: (real(B, HQ * D), real(D), 1e-6, real(9, D), torch.arange(B), D, True, HQ, D),
        score_pages: (q, *of_pages, table, n_full, 0.1),
        score_rotated: (q, *codes, table, n_full, 0.1),
        stage_pages: (layers, 1, ints(2, 2), *slots_of(4)),
        select_pages: (real(B, N), table, n_full, ints(P), 4, 1, 1, (ints(B, 4), ints(B, 4))),
        **{op: arguments() for op, arguments in of_policies("EVERY").items()},
    }  # fmt: skip


def slots_of(pages):
    return [real(pages, S, H, D) for _ in "kv"]


OPS = pytest.mark.parametrize("op", cases(), ids=lambda op: op.__name__)
MUTATES = {append_tokens, build_layer_digests, build_layer_rotated, copy_layer_pages, copy_tokens, stage_pages,
           *of_policies("MUTATES")}  # fmt: skip


def beside(op, name):
    """The native or the reference function of an op, or None."""
    return getattr(sys.modules[op.__module__], name.format(op.__name__), None)


@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
@OPS
def test_tensors_of_a_device_go_to_the_kernel(op):
    """Here tensors claim to be on one, and launches are only counted."""
    from triton.runtime.interpreter import GridExecutor

    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(GridExecutor, "__call__") as launch,
    ):
        op(*cases()[op])
    assert launch.called or op is copy_tokens, "which is for the host's pages"


# What C++ takes all the same: it is converted or looked up before, ignored, or has any length.
TAKEN = {
    "dtype": {"q", "q_ahead", "slot_of", "n_pages"},
    "last axis": {"ids", "pages", "table", "slot_of", "n_pages"},
    "axes": {"q_ahead", "slot_of", "n_pages"},
    "strides": {"q", "q_ahead", "pages", "slot_of", "n_pages"},
}


@OPS
def test_cpp_refuses_wrong_tensors(op):
    native, arguments = beside(op, "_{}_native"), cases()[op]
    if native is None:
        pytest.skip("has no C++ function")
    names = list(inspect.signature(op).parameters)
    changes = {
        "axes": lambda x: x[None],
        "dtype": lambda x: x.to(torch.int8),
        "last axis": lambda x: x.repeat_interleave(3, -1),
        "strides": lambda x: x.mT.contiguous().mT,
    }
    leaves, tree = pytree.tree_flatten_with_path(arguments)
    values = [value for _, value in leaves]
    for at, (path, tensor) in enumerate(leaves):
        name = names[path[0].idx]
        for what, change in changes.items() if isinstance(tensor, torch.Tensor) else ():
            short = tensor.dim() < 2 or 1 in tensor.shape[-2:]
            if name in TAKEN[what] or (what == "strides" and short):
                continue
            wrong = pytree.tree_unflatten([*values[:at], change(tensor), *values[at + 1 :]], tree)
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                native(*wrong)
                pytest.fail(f"{name} with other {what}")


@OPS
def test_inputs_stay_as_they_are_and_no_value_is_needed_on_the_host(op):
    """On tensors without data anything that reads a value, as a host sync would, fails."""
    if op in MUTATES:
        pytest.skip("changes its arguments")
    arguments = cases()[op]
    if op is select_pages:
        arguments = arguments[:-1]
    given = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in given]
    results = op(*arguments)
    assert all(map(torch.equal, given, before))
    to_meta = functools.partial(pytree.tree_map_only, torch.Tensor, lambda x: x.to("meta"))
    of_meta = beside(op, "{}_reference")(*to_meta(arguments))
    both = map(pytree.tree_leaves, (results, of_meta))
    for result, without_data in zip(*both, strict=True):
        assert (result.shape, result.dtype) == (without_data.shape, without_data.dtype)
