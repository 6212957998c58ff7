"""Page embeddings: building them from keys, and scoring by them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import FP8
from sglang_scout.ops.embed import build_layer_means, build_layer_pilots, largest, score_embeddings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = st.sampled_from((16, 48, 64, 80, 96, 128, 256))
BUILDS = (build_layer_means, build_layer_pilots)
IMPLS = pytest.mark.parametrize(
    ("op", "impl"), [(op, name) for op in BUILDS for name in op.names()]
)
SCORES = pytest.mark.parametrize("impl", score_embeddings.names())


def draw(seed):
    return torch.Generator().manual_seed(seed)


def build(op, source, ids, P, H, D, dtype, rng, rows=None, impl="reference", rank=24):
    """Embeddings of all layers, NaN where nothing was written, and W_k."""
    L = len(source.k)
    W, E = (2, D) if op is build_layer_means else (1, rank)
    w_k = (
        [] if op is build_layer_means else [torch.randn(L, H, rank, 2 * D, generator=rng) / D**0.5]
    )
    made = torch.full((L, P, H, W, E), torch.nan, dtype=dtype)
    op(source, ids, made, *w_k, rows, impl=impl)
    return made, *w_k


def wanted(k, w_k=()):
    """Literal float64 implementation from keys [S, H, D], of one layer."""
    k = k.double()
    if not len(w_k):
        half = len(k) // 2
        return torch.stack([k[:half].mean(0), k[half:].mean(0)], 1)
    extreme = torch.empty_like(k[0])
    for h, d in torch.cartesian_prod(torch.arange(k.shape[1]), torch.arange(k.shape[2])).tolist():
        extreme[h, d] = max(k[:, h, d].tolist(), key=lambda x: (abs(x), x))
    return torch.stack(
        [
            w.double() @ torch.cat([mean, x])
            for w, mean, x in zip(w_k, k.mean(0), extreme, strict=True)
        ]
    )[:, None]


@IMPLS
@given(
    dtype=st.sampled_from((*DTYPES, *FP8)),
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 6, 9, 20, 3))),
    D=DIMS,
    elsewhere=st.booleans(),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_named_rows_are_built_and_others_untouched(
    op, impl, agree, layer_pages, dtype, sizes, D, elsewhere, seed, data
):
    L, P, R, S, H = sizes
    S, rng = 2 * S, draw(seed)
    k = torch.randn(L, R if elsewhere else P, S, H, D, generator=rng).to(dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    rows = torch.randint(R, (L, len(ids)), generator=rng) if elsewhere else None
    dtype = torch.float16 if dtype in FP8 else dtype
    made, *w_k = build(op, layer_pages(k), ids, P, H, D, dtype, rng, rows, impl)
    for layer in range(L):
        there = ids if rows is None else rows[layer]
        for page, row in zip(ids.tolist()[:2], there.tolist()[:2], strict=True):
            agree(op, made[layer, page], wanted(k[layer, row], *(w[layer] for w in w_k)), dtype)
    rest = [page for page in range(P) if page not in ids.tolist()]
    assert made[:, rest].isnan().all() and not made[:, ids].isnan().any()


@pytest.mark.parametrize("op", BUILDS, ids=lambda op: op.name)
@pytest.mark.parametrize("impl", ["triton"])
def test_triton_skips_pages_out_of_range(op, impl, layer_pages):
    source = layer_pages(torch.randn(2, 3, 32, 2, 16))
    made = build(
        op, source, torch.tensor([3, 1, -1, 2**40]), 3, 2, 16, torch.float32, draw(1), None, impl
    )[0]
    assert made[:, [0, 2]].isnan().all() and not made[:, 1].isnan().any()
    rows = torch.tensor([[0, 3, 2], [-1, 1, 2**40]])
    made = build(op, source, torch.tensor([8, 1, 4]), 9, 2, 16, torch.float32, draw(1), rows, impl)[
        0
    ]
    assert (~made.isnan()).flatten(2).all(2).nonzero().tolist() == [[0, 4], [0, 8], [1, 1]]


@IMPLS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_keys_that_are_no_numbers_leave_finite_embeddings(op, impl, layer_pages, dtype, value):
    k = torch.full((1, 2, 32, 1, 16), value).to(dtype)
    k[0, 1, 5:9] = -value
    made = build(op, layer_pages(k), torch.arange(2), 2, 1, 16, dtype, draw(2), None, impl)[0]
    assert made.isfinite().all() and made.abs().max() <= largest(dtype)
    assert made.any() == (abs(value) == torch.inf)


def literal(q, embeddings, table, n_full):
    """Rows b * H + h in float64, one page and window at a time."""
    (B, N), (_, H, W, _) = table.shape, embeddings.shape
    result = torch.full((B * H, N), -torch.inf, dtype=torch.float64)
    for b in range(B):
        full = [n for n in range(min(N, int(n_full[b]))) if table[b, n] >= 0]
        for h in range(H):
            for n in full:
                halves = list(embeddings[table[b, n], h].double())
                if W == 2 and n + 1 in full:
                    halves.append(embeddings[table[b, n + 1], h, 0].double())
                pairs = (
                    [(x, x) for x in halves] if W == 1 else zip(halves, halves[1:], strict=False)
                )
                windows = [q[b * H + h].double() @ (x + y) / 2 for x, y in pairs]
                result[b * H + h, n] = max(windows)
    return result


def inputs(seed, B=3, N=9, P=12, H=2, W=2, E=32, dtype=torch.float32):
    rng = draw(seed)
    embeddings = torch.randn(P, H, W, E, generator=rng).to(dtype)
    table = torch.randint(-1, P, (B, N), generator=rng, dtype=torch.int32)
    n_full = torch.randint(0, N + 1, (B,), generator=rng, dtype=torch.int32)
    return torch.randn(B * H, E, generator=rng), embeddings, table, n_full


@SCORES
@pytest.mark.parametrize("W", [1, 2])
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 20, 12, 4))),
    E=st.one_of(DIMS, st.integers(1, 40)),
    seed=st.integers(0, 2**31),
)
def test_equals_the_literal_formula(agree, impl, W, dtype, sizes, E, seed):
    B, N, P, H = sizes
    arguments = inputs(seed, B, N, P, H, W, E, dtype)
    out = torch.full((B * H, N), torch.nan)
    assert score_embeddings(*arguments, impl=impl, out=out) is out
    agree(score_embeddings, out, literal(*arguments), dtype)


@SCORES
@pytest.mark.parametrize("W", [1, 2])
def test_void_columns_are_minus_infinity_whatever_they_hold(impl, W):
    """And they do not affect the page before."""
    q, embeddings, table, _ = inputs(5, B=4, W=W)
    table = torch.where(table == 11, 10, table)
    embeddings[11] = torch.nan
    table[:, 6:], table[:, 2] = 11, -1
    n_full = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    got = score_embeddings(q, embeddings, table, n_full, impl=impl).view(4, 2, 9)
    void = ((torch.arange(9) >= n_full[:, None]) | (table < 0))[:, None].expand(-1, 2, -1)
    assert (got[void] == -torch.inf).all() and got[~void].isfinite().all()


@SCORES
@pytest.mark.parametrize("W", [1, 2])
def test_rows_that_are_longer_than_a_block_of_any_kernel(agree, impl, W):
    """The window of a block's last page extends into the next block."""
    q, embeddings, _, _ = inputs(13, B=2, P=200, H=1, W=W)
    embeddings[::64] *= 50
    table = torch.arange(200, dtype=torch.int32).repeat(2, 1)
    n_full = torch.tensor([200, 70], dtype=torch.int32)
    got = score_embeddings(q, embeddings, table, n_full, impl=impl)
    agree(score_embeddings, got, literal(q, embeddings, table, n_full), times=50.0)


@SCORES
def test_no_columns(impl):
    q, embeddings, _, n_full = inputs(9)
    empty = torch.empty(3, 0, dtype=torch.int32)
    assert score_embeddings(q, embeddings, empty, n_full * 0, impl=impl).shape == (6, 0)


@pytest.mark.parametrize("impl", score_embeddings.names())
def test_means_score_as_windows_of_32_tokens_pooled_from_raw_keys(impl, layer_pages):
    """Equations 5 and 11 of the paper: kernel 32, stride 16, raw products, maximum over a page's windows."""
    rng, pages, H, D = draw(3), 7, 2, 32
    k = torch.randn(1, pages, 32, H, D, generator=rng)
    made = build(build_layer_means, layer_pages(k), torch.arange(pages), pages, H, D, k.dtype, rng)[
        0
    ]
    q = torch.randn(H, D, generator=rng)
    table, n_full = (
        torch.arange(pages, dtype=torch.int32)[None],
        torch.tensor([pages], dtype=torch.int32),
    )
    got = score_embeddings(q, made[0], table, n_full, impl=impl)
    windows = k[0].flatten(0, 1).unfold(0, 32, 16).mean(-1)  # [13, H, D]
    products = torch.einsum("hd,jhd->hj", q, windows)
    products = torch.nn.functional.pad(products, (0, 1), value=-torch.inf).unflatten(1, (-1, 2))
    torch.testing.assert_close(got, products.amax(-1), rtol=1e-5, atol=1e-5)
