import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops import triton
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.pages import copy_layer_pages

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16)
# For ids [3, n], with two layers of 4 pages and of 3 slots.
OUTSIDE = pytest.mark.parametrize(
    ("which", "bad"), [(0, 2), (0, -1), (1, 4), (2, 3), (2, -1), (2, 2**40)]
)


@pytest.mark.parametrize("impl", copy_layer_pages.names())
@given(
    dtype=st.sampled_from(DTYPES),
    page=st.sampled_from(((), (1,), (3, 5), (32, 2, 8), (7, 2, 96))),
    L=st.integers(1, 4),
    P=st.integers(1, 9),
    Ns=st.integers(1, 9),
    shift=st.integers(0, 1),
    data=st.data(),
)
def test_named_pages_are_copied_and_others_untouched(
    impl, layer_pages, dtype, page, L, P, Ns, shift, data
):
    """Lists in any order, layers with many pages or none, pages copied twice."""
    halves = torch.randint(0, 100, (2, L, P, *page)).to(dtype)
    targets = st.tuples(st.integers(0, L - 1), st.integers(0, Ns - 1))
    to = data.draw(st.lists(targets, unique=True))
    pages = data.draw(st.lists(st.integers(0, P - 1), min_size=len(to), max_size=len(to)))
    ids = torch.tensor([[layer for layer, _ in to], pages, [slot for _, slot in to]]).long()
    got, expected = ([torch.full((L, Ns, *page), 101).to(dtype) for _ in "kv"] for _ in "ab")
    copy_layer_pages(layer_pages(*halves, shift=shift), ids, *got, impl=impl)
    for half in range(2):
        for layer, page_id, slot in ids.T.tolist():
            expected[half][layer, slot] = halves[half, layer, page_id]
        assert torch.equal(got[half], expected[half])


@pytest.mark.parametrize("impl", copy_layer_pages.names())
def test_a_negative_page_is_none(impl, layer_pages):
    ids = torch.tensor([[0, 0, 1], [1, -1, 1], [2, 1, 0]])
    k, v = torch.zeros(2, 2, 3, 8)
    copy_layer_pages(layer_pages(torch.ones(2, 4, 8)), ids, k, v, impl=impl)
    for half in (k, v):
        assert half[..., 0].tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("impl", ["native", "reference"])
@OUTSIDE
def test_what_is_out_of_range_is_refused(impl, which, bad, layer_pages):
    ids = torch.tensor([[0, 0], [1, 1], [1, 2]])
    ids[which, 1] = bad
    k, v = torch.zeros(2, 2, 3, 8)
    message = f"copy_layer_pages: .* has {bad}, expected" if impl == "native" else None
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        copy_layer_pages(layer_pages(torch.ones(2, 4, 8)), ids, k, v, impl=impl)
    if impl != "reference" or which < 2:  # index_copy_ writes what comes before the bad slot
        assert (k == 0).all() and (v == 0).all()


@pytest.mark.parametrize("impl", ["triton"])
@OUTSIDE
def test_triton_skips_what_is_out_of_range(impl, which, bad, layer_pages):
    """The host cannot check ids on the device: nothing out of bounds is read or written."""
    ids = torch.tensor([[0, 1], [1, 1], [2, 2]])
    ids[which, 1] = bad
    k, v = torch.zeros(2, 2, 3, 8)
    copy_layer_pages(layer_pages(torch.ones(2, 4, 8)), ids, k, v, impl=impl)
    for half in (k, v):
        assert half[..., 0].tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_layers_that_do_not_agree_are_named():
    page = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"v\[1\] is torch.float32\[4, 9\]"):
        LayerPages.of([page, page], [page, torch.zeros(4, 9)], "cpu")
    with pytest.raises(ValueError, match=r"k\[0\] is not contiguous"):
        LayerPages.of([torch.zeros(8, 4).T], [page], "cpu")
    with pytest.raises(ValueError, match="2 layers of K, 1 of V"):
        LayerPages.of([page, page], [page], "cpu")


@pytest.mark.parametrize("impl", [x for x in copy_layer_pages.names() if x != "reference"])
@pytest.mark.parametrize("half", ["k", "v"])
def test_kernels_refuse_to_copy_within_one_memory(impl, half):
    here = "cpu" if impl == "native" or triton.interpreted() else "cuda"
    pool = torch.arange(32.0, device=here).view(1, 4, 8)
    planes = {x: torch.zeros_like(pool[0]) for x in "kv"} | {half: pool[0]}
    source = LayerPages.of([planes["k"]], [planes["v"]], here)
    ids = torch.tensor([[0], [1], [2]], device=here)
    others = [torch.zeros_like(pool) for _ in "kv"]
    for targets in ((pool, others[0]), (others[0], pool)):
        with pytest.raises(ImplementationError, match="source and targets share memory"):
            copy_layer_pages(source, ids, *targets, impl=impl)
    assert pool.flatten().tolist() == list(range(32))
    copy_layer_pages(source, ids, *others, impl=impl)


def test_within_one_memory_all_is_read_before_anything_is_written():
    pool, other = torch.arange(4.0).view(1, 4, 1), torch.zeros(1, 4, 1)
    swap = torch.tensor([[0, 0], [0, 1], [1, 0]])  # copying page by page would lose one
    copy_layer_pages(LayerPages.of([pool[0]], [torch.ones(4, 1)], "cpu"), swap, pool, other)
    assert pool.flatten().tolist() == [1.0, 0.0, 2.0, 3.0]
