import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops.digest import BUILD_DIGESTS, build_digests, digest_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = pytest.mark.parametrize("impl", BUILD_DIGESTS.names())


def poisoned(shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)


def test_reference_is_the_minimum_and_maximum_over_the_tokens():
    k = torch.tensor([[[[1.0, -2.0]], [[3.0, -5.0]], [[2.0, 0.0]]]])  # [1, 3, 1, 2]
    kmin, kmax = digest_reference(k)
    assert kmin.tolist() == [[[1.0, -5.0]]]
    assert kmax.tolist() == [[[3.0, 0.0]]]


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, n) for n in (6, 33, 5))),
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_named_rows_are_exact_and_others_untouched(impl, dtype, sizes, D, seed, data):
    P, S, H = sizes
    k = torch.randn(P, S, H, D, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    kmin, kmax = poisoned((P, H, D), dtype)
    build_digests(k, ids, kmin, kmax, impl=impl)
    for page in range(P):
        if page in ids.tolist():
            assert torch.equal(kmin[page], k[page].amin(0))
            assert torch.equal(kmax[page], k[page].amax(0))
        else:
            assert kmin[page].isnan().all()
            assert kmax[page].isnan().all()


@IMPLS
def test_extreme_values(impl):
    k = torch.zeros(1, 4, 1, 16)
    k[0, 1], k[0, 2] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    kmin, kmax = poisoned((1, 1, 16), k.dtype)
    build_digests(k, torch.tensor([0]), kmin, kmax, impl=impl)
    assert (kmin == torch.finfo(torch.float32).min).all()
    assert (kmax == torch.finfo(torch.float32).max).all()


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 3])
def test_page_out_of_range_is_refused_before_anything_is_written(impl, bad):
    k = torch.randn(3, 4, 2, 16)
    kmin, kmax = poisoned((3, 2, 16), k.dtype)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        build_digests(k, torch.tensor([bad]), kmin, kmax, impl=impl)
    assert kmin.isnan().all()


@pytest.mark.parametrize("impl", ["triton"])
def test_triton_skips_pages_out_of_range(impl):
    """Ids on the device are not seen by the host: nothing outside is read or written."""
    k = torch.randn(3, 4, 2, 16)
    kmin, kmax = poisoned((3, 2, 16), k.dtype)
    build_digests(k, torch.tensor([3, 1, -1, 2**40]), kmin, kmax, impl=impl)
    assert torch.equal(kmax[1], k[1].amax(0))
    assert kmin[[0, 2]].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kmin": torch.zeros(3, 4, 8)}, "build_digests: kmin has H=4, expected 2"),
        ({"kmax": torch.zeros(3, 2, 9)}, "build_digests: kmax has D=9, expected 8"),
        ({"kmin": torch.zeros(3, 2, 8).half()}, "kmin has dtype torch.float16, expected"),
        ({"ids": torch.zeros(1, dtype=torch.int32)}, "ids has dtype torch.int32, expected"),
        ({"k": torch.zeros(3, 2, 8)}, "k has 3 axes"),
        ({"ids": [0]}, "ids is a list, expected a tensor"),
    ],
)
def test_malformed_arguments_are_named(change, message):
    arguments = {
        "k": torch.zeros(3, 4, 2, 8),
        "ids": torch.tensor([0]),
        "kmin": torch.zeros(3, 2, 8),
        "kmax": torch.zeros(3, 2, 8),
    } | change
    with pytest.raises(ValueError, match=message):
        build_digests(**arguments)


def test_strided_keys_run_on_the_reference_only():
    k = torch.randn(3, 2, 4, 8).transpose(1, 2)  # [3, 4, 2, 8], not contiguous
    kmin, kmax = poisoned((3, 2, 8), k.dtype)
    build_digests(k, torch.tensor([0, 1, 2]), kmin, kmax)
    assert torch.equal(kmin, k.amin(1))
    with pytest.raises(ImplementationError, match="build_digests: implementation 'native'"):
        build_digests(k, torch.tensor([0]), kmin, kmax, impl="native")
