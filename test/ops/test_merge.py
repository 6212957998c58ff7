import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.attend import merge_states

IMPLS = pytest.mark.parametrize("impl", merge_states.names())
INF = torch.inf


def in_double(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.double(), lse_b.double()
    top = torch.maximum(a, b).nan_to_num(neginf=0.0)
    weight_a, weight_b = torch.exp(a - top)[..., None], torch.exp(b - top)[..., None]
    total = weight_a + weight_b
    out = (weight_a * out_a.double() + weight_b * out_b.double()) / total
    return out.masked_fill(total == 0, 0.0), (top + total[..., 0].log())


lse_values = st.one_of(st.just(-INF), st.floats(-300, 300, width=32), st.floats(-3, 3, width=32))


@IMPLS
@given(
    pairs=st.lists(st.tuples(lse_values, lse_values), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_equals_double_precision(agree, impl, pairs, seed):
    rng = torch.Generator().manual_seed(seed)
    lse_a, lse_b = torch.tensor(pairs).T.unsqueeze(0).contiguous().unbind(1)  # [1, HQ]
    out_a, out_b = (torch.randn(1, len(pairs), 8, generator=rng) for _ in range(2))
    out_a[lse_a == -INF], out_b[lse_b == -INF] = 0, 0
    expected = in_double(out_a, lse_a, out_b, lse_b)
    agree(merge_states, merge_states(out_a, lse_a, out_b, lse_b, impl=impl), expected)
    agree(merge_states, merge_states(out_b, lse_b, out_a, lse_a, impl=impl), expected)


@IMPLS
def test_an_empty_part_leaves_the_other_exactly(impl):
    out, lse = torch.randn(2, 4, 16), torch.randn(2, 4) * 30
    nothing, void = torch.zeros(2, 4, 16), torch.full((2, 4), -INF)
    for merged in (
        merge_states(out, lse, nothing, void, impl=impl),
        merge_states(nothing, void, out, lse, impl=impl),
    ):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


@IMPLS
def test_two_empty_parts_are_empty(impl):
    nothing, void = torch.zeros(2, 4, 16), torch.full((2, 4), -INF)
    out, lse = merge_states(nothing, void, nothing, void, impl=impl)
    assert (out == 0).all()
    assert (lse == -INF).all()
