"""Invariants of every op: errors name wrong arguments, inputs are unchanged, shapes never depend on values."""

import pytest
import torch
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.embed import build_layer_means, build_layer_pilots, score_embeddings
from sglang_scout.ops.salience import decay_mass, salient_bits
from sglang_scout.ops.score import score_pages

from page_weights import coordinates
from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.attend import attend_pages, merge_states
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.pages import Pool, append_tokens, copy_layer_pages, copy_tokens, stage_pages
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
        torch.zeros(P, H, *x, dtype=torch.uint8) for x in (planes_shape(1, D), (D + STATS_BYTES,))
    ]
    by = [coordinates(*size, H, D) for size in ((), (L,))]
    return {
        add_norm: (real(B, C), real(B, C), real(C), 1e-6),
        append_tokens: (real(B, H, D), real(B, H, D), n_full, *pools),
        attend_pages: (q, *slots_of(P), table, n_full, n_full, 0.1, ints(9), n_full),
        build_layer_digests: (layers, ids, *of_layers, torch.stack([ids] * L)),
        build_layer_means: (layers, ids, real(L, P, H, 2, D), torch.stack([ids] * L)),
        build_layer_pilots: (layers, ids, real(L, P, H, 1, C), real(L, H, C, 2 * D), torch.stack([ids] * L)),
        build_layer_rotated: (layers, ids, *(x.expand(L, *x.shape).clone() for x in codes),
                              torch.stack([ids] * L), by[1]),
        copy_layer_pages: (layers, torch.stack([ids % L, ids, ids]), *slots),
        copy_tokens: (layers, torch.stack([ids % L, ids, ids]).sort(1)[0], of_one_head),
        decay_mass: (q, real(B, HQ), slots_of(P)[0], table, n_full, ints(9), *[n_full] * 3, torch.arange(B).int(),
                     n_full, real(P, N, H, S), 0.1, 0.1),
        mass_change_rotated: (q, q, *codes, table, n_full, 0.1, by[0]),
        merge_states: (real(B, HQ, D), real(B, HQ), real(B, HQ, D), real(B, HQ)),
        rotate_heads: (real(B, HQ * D), real(D), 1e-6, real(9, D), torch.arange(B), D, True, HQ, D),
        salient_bits: (real(L, P, N, H, S), ints(C), ints(C), real(L, P, H)),
        score_embeddings: (real(B * H, C), real(P, H, 2, C), table, n_full),
        score_pages: (q, *of_pages, table, n_full, 0.1),
        score_rotated: (q, *codes, table, n_full, 0.1, by[0]),
        stage_pages: (layers, 1, ints(2, 2), *slots_of(4)),
        select_pages: (real(B, N), table, n_full, ints(P), 4, 1, 1, 0.9, (ints(B, 4), ints(B, 4))),
    }  # fmt: skip


def slots_of(pages):
    return [real(pages, S, H, D) for _ in "kv"]


OPS = pytest.mark.parametrize("op", cases(), ids=lambda op: op.name)
ANY_DTYPE = {"k", "q", "weight", "q_norm_weight", "cos_sin"}
ANY_SIZE = {"slot_of", "ids", "pages", "table"}  # in the last axis
MUTATES = {append_tokens, build_layer_digests, build_layer_means, build_layer_pilots, build_layer_rotated,
            copy_layer_pages, copy_tokens, decay_mass, stage_pages}  # fmt: skip
OF_LAYERS = ("source.", "target.")  # checked at construction


def changed(value, name, change):
    """``value`` with ``change`` applied to the tensor of that name, as in `Call.tensors`."""
    if "." not in name:
        return change(value)
    part = name.partition(".")[2]
    if not part.isdigit():
        return value._replace(**{part: change(getattr(value, part))})
    return tuple(change(x) if i == int(part) else x for i, x in enumerate(value))


@OPS
def test_every_wrong_tensor_is_named(op):
    arguments = cases()[op]
    call = op.check(*arguments)
    names = [name for name, _ in call.tensors if not name.startswith(OF_LAYERS)]
    for name in names:
        index = op.index[name.partition(".")[0]]
        changes = [lambda x: x[None], lambda x: x.tolist()]
        if name not in ANY_DTYPE:
            changes.append(lambda x: x.to(torch.int8))
        if name not in ANY_SIZE:
            changes.append(lambda x: x.repeat_interleave(3, -1))
        for change in changes:
            wrong = [*arguments]
            wrong[index] = changed(arguments[index], name, change)
            with pytest.raises(ValueError, match=f"^{op.name}: "):
                op(*wrong)


@OPS
def test_strided_tensors_are_refused_by_kernels_and_taken_by_the_reference(op):
    arguments = cases()[op]
    for name, tensor in op.check(*arguments).tensors:
        if (
            tensor.dim() < 2
            or tensor.shape[-2] == 1
            or name.startswith(OF_LAYERS)
            or name in ("k", "v")
        ):
            continue
        index = op.index[name.partition(".")[0]]
        strided = [*arguments]
        strided[index] = changed(arguments[index], name, lambda x: x.mT.contiguous().mT)
        reasons = op.reasons(*strided)
        for found in reasons.values():
            assert any(f"{name} is not contiguous" in reason for reason in found)
        with pytest.raises(
            ImplementationError, match=f"{op.name}: implementation 'triton' cannot run"
        ):
            op(*strided, impl="triton")


@OPS
def test_inputs_stay_as_they_are_and_no_value_is_needed_on_the_host(op):
    """On tensors without data anything that reads a value, as a host sync would, fails."""
    if op in MUTATES:
        pytest.skip("changes its arguments")
    arguments = cases()[op]
    given = [(n, x, x.clone()) for n, x in op.check(*arguments).tensors if not n.startswith("out")]
    results = op(*arguments)
    assert all(torch.equal(x, before) for _, x, before in given)

    def to_meta(value):
        if isinstance(value, tuple):
            values = [to_meta(v) for v in value]
            return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    of_meta = op.reference(*to_meta(arguments))
    both = ((x,) if isinstance(x, torch.Tensor) else x for x in (results, of_meta))
    for result, without_data in zip(*both, strict=True):
        assert (result.shape, result.dtype) == (without_data.shape, without_data.dtype)
