import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.digest_layers import (
    BUILD_LAYER_DIGESTS,
    BUILD_LAYER_SIGNS,
    build_layer_digests,
    build_layer_signs,
)
from sglang_scout.ops.gather import LayerPages
from sglang_scout.ops.signs import as_bits

OPS = ((BUILD_LAYER_DIGESTS, build_layer_digests), (BUILD_LAYER_SIGNS, build_layer_signs))
EACH = pytest.mark.parametrize(
    ("op", "build", "impl"), [(*both, impl) for both in OPS for impl in both[0].names()]
)


def layers_of(k):
    return LayerPages.of(k, k, "cpu")


@EACH
@given(
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    sizes=st.tuples(*(st.integers(1, n) for n in (4, 6, 3))),
    D=st.sampled_from((16, 80, 128)),
    shift=st.integers(0, 1),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_each_layer_is_what_its_own_op_makes_of_it(
    op, build, impl, dtype, sizes, D, shift, seed, data
):
    L, P, H = sizes
    rng = torch.Generator().manual_seed(seed)
    size = P * 32 * H * D
    flat = [torch.randn(size + shift, generator=rng).to(dtype)[shift:] for _ in range(L)]
    source = layers_of([x.view(P, 32, H, D) for x in flat])
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    got, expected = ([torch.full((L, P, H, D), 7.0).to(dtype) for _ in range(2)] for _ in range(2))
    build(source, ids, *got, impl=impl)
    op.reference(source, ids, *expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(as_bits(a), as_bits(b))
        rest = [page for page in range(P) if page not in ids.tolist()]
        assert (a[:, rest] == 7.0).all()


@pytest.mark.parametrize(("op", "build"), OPS)
def test_triton_skips_pages_out_of_range(op, build):
    source = layers_of([torch.randn(4, 32, 2, 16) for _ in range(2)])
    got, expected = ([torch.zeros(2, 4, 2, 16) for _ in range(2)] for _ in range(2))
    build(source, torch.tensor([3, 4, -1, 2**40]), *got, impl="triton")
    op.reference(source, torch.tensor([3]), *expected)
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("op", "build"), OPS)
def test_malformed_arguments_are_named(op, build):
    source, low = layers_of([torch.zeros(4, 32, 2, 16)] * 2), torch.zeros(2, 4, 2, 16)
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match=f"{op.name}: low has L=3, expected 2"):
        build(source, ids, torch.zeros(3, 4, 2, 16), low)
    with pytest.raises(ValueError, match=f"{op.name}: ids has dtype torch.int32"):
        build(source, ids.int(), low, low)
    with pytest.raises(ValueError, match=f"{op.name}: high has dtype"):
        build(source, ids, low, low.half())
