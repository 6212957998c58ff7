"""Digests of the pages of all layers, as boxes and as bits: which rows are written, and from which keys."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.signs import as_bits, build_layer_signs, signs_of

pytestmark = pytest.mark.usefixtures("isa")
OPS = (build_layer_digests, build_layer_signs)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOTH = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
IMPLS = pytest.mark.parametrize(("op", "impl"), [(op, name) for op in OPS for name in op.names()])
SIZES = st.tuples(*(st.integers(1, n) for n in (3, 6, 9, 33, 3)))


def unwritten(L, P, H, D, dtype=torch.float32):
    return [torch.full((L, P, H, D), torch.nan, dtype=dtype) for _ in range(2)]


def expected(op, k):
    """Of [L, R, S, H, D], every row's digest."""
    if op is build_layer_digests:
        return k.amin(2), k.amax(2)
    L, R, _, H, D = k.shape
    low, high = unwritten(L, R, H, D, k.dtype)
    build_layer_signs.reference(LayerPages.of([*k], [*k], "cpu"), torch.arange(R), low, high)
    return low, high


def check(op, built, wanted, ids):
    """The rows ``ids`` of all layers are these; the others are as they were."""
    rest = [page for page in range(built[0].shape[1]) if page not in ids.tolist()]
    for got, rows in zip(built, wanted, strict=True):
        assert torch.equal(as_bits(got[:, ids]), as_bits(rows))
        assert got[:, rest].isnan().all()


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=SIZES,
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    shift=st.integers(0, 1),
    elsewhere=st.booleans(),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_named_rows_are_exact_and_others_untouched(
    op, impl, layer_pages, dtype, sizes, D, shift, elsewhere, seed, data
):
    """``elsewhere``: the keys of a page do not lie in the row of its id."""
    L, P, R, S, H = sizes
    S = 32 if op is build_layer_signs else S
    elsewhere = elsewhere and impl != "native"
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(L, R if elsewhere else P, S, H, D, generator=rng).to(dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    rows = torch.randint(R, (L, len(ids)), generator=rng) if elsewhere else None
    built = unwritten(L, P, H, D, dtype)
    op(layer_pages(k, shift=shift), ids, *built, rows, impl=impl)
    there = ids.expand(L, -1) if rows is None else rows
    wanted = [x[torch.arange(L)[:, None], there] for x in expected(op, k)]
    check(op, built, wanted, ids)


@pytest.mark.parametrize("op", OPS[:1])
def test_native_leaves_other_rows_to_others(op, layer_pages):
    arguments = (
        layer_pages(torch.randn(2, 5, 32, 2, 16)),
        torch.tensor([1]),
        *unwritten(2, 3, 2, 16),
    )
    with pytest.raises(ImplementationError, match="native reads a page in the row of its id"):
        op(*arguments, torch.tensor([[4], [0]]), impl="native")
    with pytest.raises(ValueError, match="rows has L=1, expected 2"):
        op(*arguments, torch.tensor([[4]]))


@pytest.mark.parametrize("op", OPS[:1])
@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 3])
def test_page_out_of_range_is_refused_before_anything_is_written(op, impl, bad, layer_pages):
    low, high = unwritten(2, 3, 2, 16)
    message = f"{op.name}: ids has {bad}, expected" if impl == "native" else None
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        op(layer_pages(torch.randn(2, 3, 32, 2, 16)), torch.tensor([0, bad]), low, high, impl=impl)
    assert low.isnan().all() and high.isnan().all()


@BOTH
@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_skips_pages_out_of_range(op, impl, dtype, layer_pages):
    """Ids on the device are not seen by the host: nothing outside is read or written."""
    k = torch.randn(2, 3, 32, 2, 16).to(dtype)
    wanted, built = expected(op, k), unwritten(2, 3, 2, 16, dtype)
    op(layer_pages(k), torch.tensor([3, 1, -1, 2**40]), *built, impl=impl)
    check(op, built, [x[:, 1:2] for x in wanted], torch.tensor([1]))
    built = unwritten(2, 9, 2, 16, dtype)
    rows = torch.tensor([[0, 3, 2], [-1, 1, 2**40]])
    op(layer_pages(k), torch.tensor([8, 1, 4]), *built, rows, impl=impl)
    for got, full in zip(built, wanted, strict=True):
        for layer, page, row in ((0, 8, 0), (0, 4, 2), (1, 1, 1)):
            assert torch.equal(as_bits(got[layer, page]), as_bits(full[layer, row]))
        written = ~got.isnan().all((2, 3))
        assert written.nonzero().tolist() == [[0, 4], [0, 8], [1, 1]]


@pytest.mark.parametrize("impl", build_layer_digests.names())
def test_extreme_values(impl, layer_pages):
    limits = torch.finfo(torch.float32)
    k = torch.zeros(2, 1, 4, 1, 16)
    k[:, 0, 1], k[:, 0, 2] = limits.max, limits.min
    low, high = unwritten(2, 1, 1, 16)
    build_layer_digests(layer_pages(k), torch.tensor([0]), low, high, impl=impl)
    assert (low == limits.min).all() and (high == limits.max).all()


@pytest.mark.parametrize("impl", build_layer_signs.names())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sign_can_be_read_back(impl, dtype, layer_pages):
    k = torch.randn(2, 4, 32, 3, 80).to(dtype)
    k[-1, 0, 0], k[-1, 1, 31], k[-1, 2, 5], k[-1, 3, 17] = 0.0, -0.0, math.inf, -math.inf
    low, high = unwritten(2, 4, 3, 80, dtype)
    build_layer_signs(layer_pages(k), torch.arange(4), low, high, impl=impl)
    signs = signs_of(*(x.flatten(0, 1) for x in (low, high)))
    assert torch.equal(signs, torch.where(torch.signbit(k), -1.0, 1.0).flatten(0, 1))
