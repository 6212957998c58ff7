import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.merge import MERGE_STATES, merge_reference, merge_states

IMPLS = pytest.mark.parametrize("impl", MERGE_STATES.names())
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
    agree(MERGE_STATES, merge_states(out_a, lse_a, out_b, lse_b, impl=impl), expected)
    agree(MERGE_STATES, merge_states(out_b, lse_b, out_a, lse_a, impl=impl), expected)


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


def test_inputs_are_not_changed_and_no_value_is_needed_on_the_host():
    state = [torch.randn(2, 4, 8), torch.randn(2, 4), torch.randn(2, 4, 8), torch.randn(2, 4)]
    before = [t.clone() for t in state]
    merge_states(*state)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    out, lse = merge_reference(*(t.to("meta") for t in state))
    assert (out.shape, lse.shape) == ((2, 4, 8), (2, 4))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, torch.zeros(2, 5), "merge_states: lse_a has Q=5, expected 4"),
        (2, torch.zeros(2, 4, 9), "merge_states: out_b has D=9, expected 8"),
        (3, torch.zeros(2, 4).half(), "merge_states: lse_b has dtype torch.float16"),
    ],
)
def test_malformed_arguments_are_named(index, value, message):
    state = [torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(2, 4, 8), torch.zeros(2, 4)]
    state[index] = value
    with pytest.raises(ValueError, match=message):
        merge_states(*state)
