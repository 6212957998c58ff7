import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.score import REDUCTIONS, score_pages

IMPLS = pytest.mark.parametrize("impl", score_pages.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def literal(q, kmin, kmax, table, n_full, scale, reduce):
    """Quest's formula literally in float64, one row and one page at a time."""
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
        else:
            value = (u - torch.logsumexp(u, 0)).amax(1)
        result[b, columns] = value
    return result


def inputs(seed, B=3, N=9, P=12, H=2, G=3, D=64, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(P, 8, H, D, generator=rng).to(dtype)
    kmin, kmax = k.aminmax(dim=1)
    q = torch.randn(B, H * G, D, generator=rng).to(dtype).float()
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return q, kmin, kmax, table, n_full


@IMPLS
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("reduce", REDUCTIONS)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 12, 20, 4, 6))),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    seed=st.integers(0, 2**31),
)
def test_equals_the_literal_formula(agree, impl, reduce, dtype, sizes, D, seed):
    B, N, P, H, G = sizes
    q, kmin, kmax, table, n_full = inputs(seed, B, N, P, H, G, D, dtype)
    out = torch.full((B, N), torch.nan)
    scale = D**-0.5
    got = score_pages(q, kmin, kmax, table, n_full, scale, reduce, impl=impl, out=out)
    assert got is out
    agree(score_pages, got, literal(q, kmin, kmax, table, n_full, scale, reduce), dtype)


@IMPLS
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_void_columns_are_minus_infinity_whatever_they_hold(impl, reduce):
    q, kmin, kmax, table, _ = inputs(5, B=4, N=9, P=12)
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
    """200 pages, with bounds of different magnitude in each run of pages, and one row that ends early."""
    q, kmin, kmax, _, _ = inputs(13, B=2, P=200, H=1, G=2)
    level = 1 + torch.arange(200) // 50 % 3
    kmin, kmax = (x * level[:, None, None] for x in (kmin, kmax))
    table = torch.arange(200, dtype=torch.int32).repeat(2, 1)
    n_full = torch.tensor([200, 70], dtype=torch.int32)
    got = score_pages(q, kmin, kmax, table, n_full, 0.125, reduce, impl=impl)
    agree(score_pages, got, literal(q, kmin, kmax, table, n_full, 0.125, reduce))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("impl", ["native"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_huge_bounds_are_finite(impl, reduce):
    kmin, kmax = torch.full((3, 1, 64), -3e38), torch.full((3, 1, 64), 3e38)
    table, n_full = torch.arange(3, dtype=torch.int32)[None], torch.tensor([3], dtype=torch.int32)
    out = score_pages(
        torch.full((1, 2, 64), 3e38), kmin, kmax, table, n_full, 1.0, reduce, impl=impl
    )
    assert out.isfinite().all() and (out == out[0, 0]).all()


@pytest.mark.parametrize(
    ("rows", "blocks", "parts", "waves"),
    [  # 528 programs at once: an H100's
        (32 * 8, 32, 2, 1),  # 32 requests of 64k tokens, 8 KV heads
        (8, 64, 64, 1),  # one request of 128k: a block each
        (8, 3, 3, 1),  # no more parts than blocks
        (64 * 8, 32, 1, 1),
        (67 * 8, 32, 8, 9),  # a little more than fit: 9 waves of 4 blocks, not 2 of 32
        (200 * 8, 32, 4, 13),
    ],
)
def test_parts_fill_waves(rows, blocks, parts, waves):
    score = pytest.importorskip("sglang_scout.ops.triton.score")
    found = score.parts_of(rows, blocks, 528)
    assert (found, -(-rows * found // 528)) == (parts, waves)


@IMPLS
def test_no_columns(impl):
    q, kmin, kmax, _, n_full = inputs(9)
    empty = torch.empty(3, 0, dtype=torch.int32)
    assert score_pages(q, kmin, kmax, empty, n_full * 0, 1.0, impl=impl).shape == (3, 0)


@pytest.mark.parametrize("impl", ["native"])
@pytest.mark.parametrize(("name", "value"), [("table", 12), ("n_full", 10), ("n_full", -1)])
def test_native_refuses_what_would_read_outside(impl, name, value):
    q, kmin, kmax, table, n_full = inputs(1)
    n_full[0] = 9
    {"table": table, "n_full": n_full}[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=rf"score_pages: {name}\[0.*\]={value} is "):
        score_pages(q, kmin, kmax, table, n_full, 1.0, impl=impl)
