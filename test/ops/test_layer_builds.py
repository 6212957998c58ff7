"""Digests of the pages of all layers, of each kind: which rows are written, and from which keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import FP8
from benchmark.kernels.tolerances import tolerance_of
from implementations import implementations, name_of
from op_calls import of_policies
from sglang_scout.ops import rotated
from sglang_scout.ops.minmax import build_layer_digests
from sglang_scout.ops.pages import LayerPages, largest
from sglang_scout.ops.rotated import PAGE_TOKENS, STATS_BYTES, build_layer_rotated, planes_shape

pytestmark = pytest.mark.usefixtures("isa")
EMBEDS = tuple(of_policies("BUILDS"))
OPS = tuple((op, op) for op in (build_layer_digests, build_layer_rotated, *EMBEDS))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8)
RANK = 24
IMPLS = implementations(*OPS, also="op")
OF_EMBEDS = implementations(*OPS[2:], also="op")
SIZES = st.tuples(*(st.integers(1, n) for n in (3, 6, 9, 17, 3)))
UNWRITTEN = 0xFF  # NaN as the bytes of a float


def unwritten(op, L, P, H, D, dtype=torch.float32):
    if op is build_layer_rotated:
        shapes, dtype = [planes_shape(D), (D + STATS_BYTES,)], torch.uint8
    else:
        shapes = {
            "build_layer_digests": [(D,), (D,)],
            "build_layer_means": [(2, D)],
            "build_layer_pilots": [(1, RANK)],
        }[op.__name__]
    parts = [torch.empty(L, P, H, *shape, dtype=dtype) for shape in shapes]
    for part in parts:
        part.view(torch.uint8).fill_(UNWRITTEN)
    return parts


def weights(op, L, H, D):
    """Arguments between the parts and ``rows``."""
    if op.__name__ != "build_layer_pilots":
        return []
    return [torch.randn(L, H, RANK, 2 * D, generator=torch.Generator().manual_seed(0)) / D**0.5]


def expected(op, k):
    """Every row's digest, for k [L, R, S, H, D]; of embeddings and bounds written out."""
    L, R, S, H, D = k.shape
    if op is build_layer_digests:
        return k.amin(2), k.amax(2)
    if op is build_layer_rotated:  # test_rotated.py has the formula
        parts = unwritten(op, L, R, H, D)
        rotated.build_layer_rotated_reference(
            LayerPages.of([*k], [*k], "cpu"), torch.arange(R), *parts
        )
        return parts
    x = k.double()
    if op.__name__ == "build_layer_means":
        return [torch.stack([half.mean(2) for half in x.split(S // 2, 2)], 3)]
    high, low = x.amax(2), x.amin(2)
    pooled = torch.cat([x.mean(2), torch.where(high >= -low, high, low)], -1)
    return [torch.einsum("lhex,lnhx->lnhe", weights(op, L, H, D)[0].double(), pooled)[..., None, :]]


def is_unwritten(part):
    return (part.view(torch.uint8) == UNWRITTEN).all()


def assert_same(op, got, wanted):
    """Compares parts of the same pages. Rounding may change bits close to a threshold, and steps."""
    if op is build_layer_digests:
        assert all(map(torch.equal, got, wanted))
        return
    if op in EMBEDS:
        tolerance = tolerance_of(op, got[0].dtype)
        assert not tolerance.mismatch(got[0].double(), wanted[0].double())
        return
    if got[0].numel():  # test_rotated.py has what is stored to the last bit
        different = [(a != b).float().mean() for a, b in zip(got, wanted, strict=True)]
        assert different[0] < 0.01 and different[1] < 0.15


def check(op, built, wanted, ids):
    """The rows ``ids`` of all layers are as wanted; the others are unchanged."""
    rest = [page for page in range(built[0].shape[1]) if page not in ids.tolist()]
    assert_same(op, [part[:, ids] for part in built], wanted)
    assert all(is_unwritten(part[:, rest]) for part in built)


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    wider=st.sampled_from(DTYPES[:3]),
    sizes=SIZES,
    D=st.sampled_from((16, 48, 64, 80, 96, 128, 256)),
    shift=st.integers(0, 1),
    elsewhere=st.booleans(),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_named_rows_are_built_and_others_untouched(
    op, impl, layer_pages, dtype, wider, sizes, D, shift, elsewhere, seed, data
):
    """``elsewhere``: the keys of a page are not in the row of its id. ``wider``: digests of fp8."""
    L, P, R, S, H = sizes
    S = PAGE_TOKENS if op is build_layer_rotated else 2 * S
    elsewhere = elsewhere and name_of(impl) != "native"
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(L, R if elsewhere else P, S, H, D, generator=rng).to(dtype)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, P - 1), unique=True)), dtype=torch.int64)
    rows = torch.randint(R, (L, len(ids)), generator=rng) if elsewhere else None
    stored = wider if dtype in FP8 else dtype
    built = unwritten(op, L, P, H, D, stored)
    impl(layer_pages(k, shift=shift), ids, *built, *weights(op, L, H, D), rows)
    there = ids.expand(L, -1) if rows is None else rows
    wanted = [x[torch.arange(L)[:, None], there] for x in expected(op, k.to(stored))]
    check(op, built, wanted, ids)


@implementations(*OPS[:2], only=("native", "reference"), also="op")
@pytest.mark.parametrize("bad", [-1, 3])
def test_page_out_of_range_is_refused_before_anything_is_written(op, impl, bad, layer_pages):
    built = unwritten(op, 2, 3, 2, 16)
    message = f"ids has {bad}, expected" if name_of(impl) == "native" else None
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        impl(layer_pages(torch.randn(2, 3, 32, 2, 16)), torch.tensor([0, bad]), *built)
    assert all(map(is_unwritten, built))


@implementations(*OPS, only=("triton",), also="op")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_skips_pages_out_of_range(op, impl, dtype, layer_pages):
    """The host cannot check ids on the device: nothing out of bounds is read or written."""
    k, more = torch.randn(2, 3, 32, 2, 16).to(dtype), weights(op, 2, 2, 16)
    wanted, built = expected(op, k), unwritten(op, 2, 3, 2, 16, dtype)
    impl(layer_pages(k), torch.tensor([3, 1, -1, 2**40]), *built, *more)
    check(op, built, [x[:, 1:2] for x in wanted], torch.tensor([1]))
    built = unwritten(op, 2, 9, 2, 16, dtype)
    rows = torch.tensor([[0, 3, 2], [-1, 1, 2**40]])
    impl(layer_pages(k), torch.tensor([8, 1, 4]), *built, *more, rows)
    for layer, page, row in ((0, 8, 0), (0, 4, 2), (1, 1, 1)):
        at = slice(layer, layer + 1)
        assert_same(op, [x[at, [page]] for x in built], [x[at, [row]] for x in wanted])
    for part in built:
        written = ~(part.view(torch.uint8) == UNWRITTEN).flatten(2).all(2)
        assert written.nonzero().tolist() == [[0, 4], [0, 8], [1, 1]]


@OF_EMBEDS
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_keys_that_are_no_numbers_leave_finite_embeddings(op, impl, layer_pages, dtype, value):
    k = torch.full((1, 2, 32, 1, 16), value).to(dtype)
    k[0, 1, 5:9] = -value
    (made,) = unwritten(op, 1, 2, 1, 16, dtype)
    impl(layer_pages(k), torch.arange(2), made, *weights(op, 1, 1, 16))
    assert made.isfinite().all() and made.abs().max() <= largest(dtype)
    assert made.any() == (abs(value) == torch.inf)
