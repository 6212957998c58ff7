import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import FP8
from sglang_scout.ops.pages import Pool, append_tokens

IMPLS = pytest.mark.parametrize("impl", append_tokens.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST_INT32 = 2**31 - 1


def pool(rng, ids, P, S, H, D, dtype):
    shape = (P, S, H, D)
    k, v = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    return Pool(k, v, torch.tensor(ids, dtype=torch.int32))


def expected(k, v, lens, to):
    pages = to.k.clone(), to.v.clone()
    for b, page in enumerate(to.ids.tolist()):
        if page >= 0:
            pages[0][page, lens[b] - 1] = k[b].to(to.k.dtype)
            pages[1][page, lens[b] - 1] = v[b].to(to.v.dtype)
    return pages


@IMPLS
@given(
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from((*DTYPES, *FP8))),
    sizes=st.tuples(*(st.integers(1, n) for n in (5, 9, 33, 4))),
    D=st.sampled_from((16, 64, 80, 128)),
    with_mirror=st.booleans(),
    data=st.data(),
)
def test_writes_that_token_and_no_other(impl, dtypes, sizes, D, with_mirror, data):
    B, P, S, H = sizes
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    # A view of a fused projection: rows are strided.
    fused = torch.randn(B, 3 * H * D, generator=rng).to(dtypes[0])
    k, v = (part.view(B, H, D) for part in fused.split(H * D, 1)[1:])
    lens = torch.randint(1, S + 1, (B,), generator=rng, dtype=torch.int32)

    def ids(pages):
        chosen = torch.randperm(pages, generator=rng)[:B].tolist()
        chosen += [-1] * (B - len(chosen))
        return [-1 if data.draw(st.booleans()) else page for page in chosen]

    to = pool(rng, ids(P), P, S, H, D, dtypes[1])
    mirror = pool(rng, ids(P + 3), P + 3, S, H, D, dtypes[1]) if with_mirror else None
    want = [expected(k, v, lens.tolist(), p) for p in (to, mirror) if p is not None]
    append_tokens(k, v, lens, to, mirror, impl=impl)
    for got, (want_k, want_v) in zip((to, mirror), want, strict=False):
        assert torch.equal(got.k.float(), want_k.float())
        assert torch.equal(got.v.float(), want_v.float())


@IMPLS
def test_rounds_to_the_nearest_even(impl):
    k = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16]).repeat(4).view(1, 1, 16)
    to = pool(torch.Generator(), [0], 1, 1, 1, 16, torch.bfloat16)
    append_tokens(k, -k, torch.tensor([1], dtype=torch.int32), to, impl=impl)
    assert to.k.flatten()[:4].tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7]
    assert torch.equal(to.v, -to.k)


@IMPLS
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16])
def test_rounds_every_value_to_fp8_as_torch_does(impl, dtype, of):
    """Including values out of range and NaN, bit for bit."""
    k = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(of).view(8, 64, 128)
    to = pool(torch.Generator(), list(range(8)), 8, 1, 64, 128, dtype)
    append_tokens(k, k, torch.ones(8, dtype=torch.int32), to, impl=impl)
    assert torch.equal(to.k[:, 0].view(torch.uint8), k.to(dtype).view(torch.uint8))


@IMPLS
@pytest.mark.parametrize("dtype", FP8)
def test_rounds_float32_to_fp8_as_torch_does(impl, dtype):
    bits = torch.randint(-(2**31), 2**31, (8, 64, 128), generator=torch.Generator().manual_seed(1))
    k = bits.to(torch.int32).view(torch.float32)
    k[:4] = torch.randn(4, 64, 128) * 2.0 ** torch.randint(-18, 18, (4, 64, 128))
    to = pool(torch.Generator(), list(range(8)), 8, 1, 64, 128, dtype)
    append_tokens(k, k, torch.ones(8, dtype=torch.int32), to, impl=impl)
    assert torch.equal(to.k[:, 0].view(torch.uint8), k.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("page", "length"), [(4, 1), (LAST_INT32, 1), (3, 9), (3, 0)])
def test_triton_skips_what_would_write_outside(impl, page, length):
    to = pool(torch.Generator(), [page, 2], 4, 8, 2, 16, torch.float32)
    before = to.k.clone()
    k = torch.ones(2, 2, 16)
    append_tokens(k, k, torch.tensor([length, 1], dtype=torch.int32), to, impl=impl)
    before[2, 0] = 1.0
    assert torch.equal(to.k, before)
