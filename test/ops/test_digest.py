import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.digest import build_layer_digests

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = pytest.mark.parametrize("impl", build_layer_digests.names())


def unwritten(*shape, dtype=torch.float32):
    return [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 6, 33, 4))),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    shift=st.integers(0, 1),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_named_rows_are_exact_and_others_untouched(
    impl, layer_pages, dtype, sizes, D, shift, seed, data
):
    L, P, S, H = sizes
    k = torch.randn(L, P, S, H, D, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    kmin, kmax = unwritten(L, P, H, D, dtype=dtype)
    build_layer_digests(layer_pages(k, shift=shift), ids, kmin, kmax, impl=impl)
    rest = [page for page in range(P) if page not in ids.tolist()]
    for got, expected in ((kmin, k.amin(2)), (kmax, k.amax(2))):
        assert torch.equal(got[:, ids], expected[:, ids])
        assert got[:, rest].isnan().all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 6, 9, 33, 4))),
    D=st.sampled_from((16, 64, 96)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_keys_that_lie_in_other_rows(impl, layer_pages, dtype, sizes, D, seed, data):
    L, P, R, S, H = sizes
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(L, R, S, H, D, generator=rng).to(dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    rows = torch.randint(R, (L, len(ids)), generator=rng)
    kmin, kmax = unwritten(L, P, H, D, dtype=dtype)
    build_layer_digests(layer_pages(k), ids, kmin, kmax, rows, impl=impl)
    there = k[torch.arange(L)[:, None], rows]
    rest = [page for page in range(P) if page not in ids.tolist()]
    for got, expected in ((kmin, there.amin(2)), (kmax, there.amax(2))):
        assert torch.equal(got[:, ids], expected)
        assert got[:, rest].isnan().all()


def test_native_leaves_other_rows_to_others(layer_pages):
    kmin, kmax = unwritten(2, 3, 2, 16)
    arguments = (layer_pages(torch.randn(2, 5, 4, 2, 16)), torch.tensor([1]), kmin, kmax)
    with pytest.raises(ImplementationError, match="native reads a page in the row of its id"):
        build_layer_digests(*arguments, torch.tensor([[4], [0]]), impl="native")
    with pytest.raises(ValueError, match="rows has L=1, expected 2"):
        build_layer_digests(*arguments, torch.tensor([[4]]))


@IMPLS
def test_extreme_values(impl, layer_pages):
    limits = torch.finfo(torch.float32)
    k = torch.zeros(2, 1, 4, 1, 16)
    k[:, 0, 1], k[:, 0, 2] = limits.max, limits.min
    kmin, kmax = unwritten(2, 1, 1, 16)
    build_layer_digests(layer_pages(k), torch.tensor([0]), kmin, kmax, impl=impl)
    assert (kmin == limits.min).all()
    assert (kmax == limits.max).all()


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 3])
def test_page_out_of_range_is_refused_before_anything_is_written(impl, bad, layer_pages):
    kmin, kmax = unwritten(2, 3, 2, 16)
    message = f"build_layer_digests: ids has {bad}, expected" if impl == "native" else None
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        build_layer_digests(
            layer_pages(torch.randn(2, 3, 4, 2, 16)), torch.tensor([0, bad]), kmin, kmax, impl=impl
        )
    assert kmin.isnan().all() and kmax.isnan().all()


@pytest.mark.parametrize("impl", ["triton"])
def test_triton_skips_pages_out_of_range(impl, layer_pages):
    """Ids on the device are not seen by the host: nothing outside is read or written."""
    k = torch.randn(2, 3, 4, 2, 16)
    kmin, kmax = unwritten(2, 3, 2, 16)
    ids = torch.tensor([3, 1, -1, 2**40])
    build_layer_digests(layer_pages(k), ids, kmin, kmax, impl=impl)
    for got, expected in ((kmin, k.amin(2)), (kmax, k.amax(2))):
        assert torch.equal(got[:, 1], expected[:, 1])
        assert got[:, [0, 2]].isnan().all()
    kmin, kmax = unwritten(2, 9, 2, 16)
    rows = torch.tensor([[0, 3, 2], [-1, 1, 2**40]])
    build_layer_digests(layer_pages(k), torch.tensor([8, 1, 4]), kmin, kmax, rows, impl=impl)
    for got, expected in ((kmin, k.amin(2)), (kmax, k.amax(2))):
        assert torch.equal(got[0, 8], expected[0, 0]) and torch.equal(got[0, 4], expected[0, 2])
        assert torch.equal(got[1, 1], expected[1, 1])
        assert (~got.isnan()).sum() == 3 * 2 * 16
