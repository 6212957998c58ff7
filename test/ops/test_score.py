import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.digest import digest_reference
from sglang_scout.ops.score import REDUCTIONS, SCORE_PAGES, score_pages

IMPLS = pytest.mark.parametrize("impl", SCORE_PAGES.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def literal(q, kmin, kmax, table, n_full, scale, reduce):
    """Quest's formula word for word in float64, one row and one page at a time."""
    B, N = table.shape
    G = q.shape[1] // kmin.shape[1]
    q, low, high = q.double(), kmin.double(), kmax.double()
    result = torch.full((B, N), -torch.inf, dtype=torch.float64)
    for b in range(B):
        columns = [n for n in range(min(N, int(n_full[b]))) if table[b, n] >= 0]
        if not columns:
            continue
        u = torch.stack(
            [
                torch.maximum(
                    q[b] * low[table[b, n]].repeat_interleave(G, 0),
                    q[b] * high[table[b, n]].repeat_interleave(G, 0),
                ).sum(-1)
                * scale
                for n in columns
            ]
        )  # [columns, HQ]
        if reduce == "mass":
            value = torch.softmax(u, 0).sum(1)
        elif reduce == "max":
            value = (u - torch.logsumexp(u, 0)).amax(1)
        else:
            value = u.sum(1)
        result[b, columns] = value
    return result


def inputs(seed, B=3, N=9, P=12, H=2, G=3, D=64, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, 8, H, D, generator=rng).to(dtype)
    kmin, kmax = digest_reference(k)
    q = torch.randn(B, H * G, D, generator=rng)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return q, k, kmin, kmax, table, n_full


@IMPLS
@pytest.mark.parametrize("reduce", REDUCTIONS)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 12, 20, 4, 6))),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    seed=st.integers(0, 2**31),
)
def test_equals_the_literal_formula(agree, impl, reduce, dtype, sizes, D, seed):
    B, N, P, H, G = sizes
    q, _, kmin, kmax, table, n_full = inputs(seed, B, N, P, H, G, D, dtype)
    out = torch.full((B, N), torch.nan)
    scale = D**-0.5
    got = score_pages(q, kmin, kmax, table, n_full, scale, reduce, impl=impl, out=out)
    assert got is out
    agree(SCORE_PAGES, got, literal(q, kmin, kmax, table, n_full, scale, reduce), dtype)


@IMPLS
def test_bounds_every_token_of_the_page(impl):
    """What makes it a bound: u >= q.k for every token, reached when the page has one token."""
    q, k, kmin, kmax, table, n_full = inputs(3, H=1, G=1)
    n_full.fill_(9)
    u = score_pages(q, kmin, kmax, table, n_full, 1.0, "sum", impl=impl)
    for b, n in (table >= 0).nonzero().tolist():
        tokens = k[table[b, n], :, 0] @ q[b, 0]
        assert u[b, n] >= tokens.max() - 1e-4
    one = digest_reference(k[:, :1])
    u = score_pages(q, *one, table, n_full, 1.0, "sum", impl=impl)
    for b, n in (table >= 0).nonzero().tolist():
        assert math.isclose(u[b, n], k[table[b, n], 0, 0] @ q[b, 0], rel_tol=1e-4, abs_tol=1e-4)


@IMPLS
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_void_columns_are_minus_infinity_whatever_they_hold(impl, reduce):
    q, _, kmin, kmax, table, _ = inputs(5, B=4, N=9, P=12)
    table = torch.where(table == 11, 10, table)
    kmin[11], kmax[11] = torch.nan, torch.nan  # a page that was never written
    table[:, 6:] = 11
    table[:, 2] = -1
    n_full = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    got = score_pages(q, kmin, kmax, table, n_full, 0.125, reduce, impl=impl)
    void = (torch.arange(9) >= n_full[:, None]) | (table < 0)
    assert (got[void] == -torch.inf).all()
    assert got[~void].isfinite().all()


@IMPLS
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_that_are_longer_than_a_block_of_any_kernel(agree, impl, reduce):
    """200 pages, the bounds of each stretch of pages on another level, one row that ends early."""
    q, _, kmin, kmax, _, _ = inputs(13, B=2, P=200, H=1, G=2)
    level = 1 + torch.arange(200) // 50 % 3
    kmin, kmax = (x * level[:, None, None] for x in (kmin, kmax))
    table = torch.arange(200, dtype=torch.int32).repeat(2, 1)
    n_full = torch.tensor([200, 70], dtype=torch.int32)
    got = score_pages(q, kmin, kmax, table, n_full, 0.125, reduce, impl=impl)
    agree(SCORE_PAGES, got, literal(q, kmin, kmax, table, n_full, 0.125, reduce))


@IMPLS
def test_mass_adds_up_to_the_number_of_heads(impl):
    q, _, kmin, kmax, table, n_full = inputs(7)
    table[:, 0], n_full[:] = 0, 9
    got = score_pages(
        q * 50, kmin, kmax, table, n_full, 1.0, "mass", impl=impl
    )  # peaked, no overflow
    total = got.masked_fill(got == -torch.inf, 0).sum(1)
    assert torch.allclose(total, torch.full((3,), 6.0), atol=1e-4)


@IMPLS
def test_no_columns(impl):
    q, _, kmin, kmax, _, n_full = inputs(9)
    empty = torch.empty(3, 0, dtype=torch.int32)
    assert score_pages(q, kmin, kmax, empty, n_full * 0, 1.0, impl=impl).shape == (3, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kmax": torch.zeros(12, 4, 64)}, "score_pages: kmax has H=4, expected 2"),
        ({"q": torch.zeros(3, 5, 64)}, "score_pages: q has HQ=5, expected a multiple of H=2"),
        ({"q": torch.zeros(2, 6, 64)}, "score_pages: q has B=2, expected 3"),
        ({"q": torch.zeros(3, 6, 64).half()}, "score_pages: q is torch.float16"),
        ({"table": torch.zeros(3, 9, dtype=torch.int64)}, "table has dtype torch.int64"),
        ({"n_full": torch.zeros(2, dtype=torch.int32)}, "n_full has B=2, expected 3"),
        ({"reduce": "mean"}, "reduce is 'mean', expected one of mass, max, sum"),
        ({"out": torch.zeros(3, 8)}, "out has N=8, expected 9"),
    ],
)
def test_malformed_arguments_are_named(change, message):
    q, _, kmin, kmax, table, n_full = inputs(1)
    arguments = dict(q=q, kmin=kmin, kmax=kmax, table=table, n_full=n_full, scale=1.0) | change
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        score_pages(**arguments)


@pytest.mark.parametrize("impl", ["native"])
@pytest.mark.parametrize(("name", "value"), [("table", 12), ("n_full", 10), ("n_full", -1)])
def test_native_refuses_what_would_read_outside(impl, name, value):
    q, _, kmin, kmax, table, n_full = inputs(1)
    n_full[0] = 9
    {"table": table, "n_full": n_full}[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=f"score_pages: {name} has {value}, expected values "):
        score_pages(q, kmin, kmax, table, n_full, 1.0, impl=impl)
