import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.advance import Correction, advance_input

IMPLS = pytest.mark.parametrize("impl", advance_input.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(seed=0, B=3, C=24, r=4, carry=0.5, learned=True, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return torch.randn(*shape, generator=rng) * scale

    parts = [random(C, r, scale=0.2), random(C, r, scale=0.2), random(r, C), random(C)]
    return {
        "x": random(B, C, scale=3.0).to(dtype),
        "before": random(B, C, scale=2.0).to(dtype),
        "after": random(B, C, scale=2.0).to(dtype),
        "known": torch.rand(B, generator=rng) < 0.7,
        "carry": carry,
        "correction": Correction(*parts) if learned else None,
    }


def row_by_row(c):
    """Oracle in float64, one row at a time."""
    out = c["x"].double().clone()
    for b, x in enumerate(c["x"].double()):
        if not c["known"][b]:
            continue
        before, after = c["before"][b].double(), c["after"][b].double()
        out[b] = x + c["carry"] * (after - before)
        if c["correction"] is not None:
            now, previous, up, bias = (t.double() for t in c["correction"])
            size = (x @ x / len(x)).sqrt()
            last = after / (after @ after / len(x)).sqrt()
            out[b] += size * (up.T @ (now.T @ x / size + previous.T @ last) + bias)
    return out


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    B=st.integers(1, 5),
    C=st.sampled_from((1, 8, 96)),
    r=st.integers(1, 9),
    carry=st.sampled_from((0.0, 0.25, 1.0)),
    learned=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_double_precision(agree, impl, dtype, B, C, r, carry, learned, seed):
    c = case(seed, B, C, r, carry, learned, dtype)
    got = advance_input(**c, impl=impl)
    assert got.dtype == dtype
    agree(advance_input, got.float(), row_by_row(c), dtype)


@IMPLS
def test_rows_without_a_previous_token_come_back_as_they_are(impl):
    c = case(dtype=torch.bfloat16)
    c["known"] = torch.tensor([False, True, False])
    c["after"][0] = torch.nan  # whatever stands there
    got = advance_input(**c, impl=impl)
    assert torch.equal(got[[0, 2]], c["x"][[0, 2]])
    assert not torch.equal(got[1], c["x"][1])


@IMPLS
def test_zeros_stay_finite(impl):
    c = case()
    for name in ("x", "before", "after"):
        c[name].zero_()
    assert advance_input(**c, impl=impl).isfinite().all()
