import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops import triton
from sglang_scout.ops.gather import (
    COPY_LAYER_PAGES,
    COPY_PAGES,
    LayerPages,
    copy_layer_pages,
    copy_layer_pages_reference,
    copy_pages,
)

IMPLS = pytest.mark.parametrize("impl", COPY_PAGES.names())
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16)


@IMPLS
@given(
    dtype=st.sampled_from(DTYPES),
    page=st.sampled_from(((), (1,), (3, 5), (32, 2, 8), (7, 2, 96))),
    P=st.integers(1, 9),
    Ns=st.integers(1, 9),
    data=st.data(),
)
def test_named_pages_are_copied_and_others_untouched(impl, dtype, page, P, Ns, data):
    src = torch.randint(0, 100, (P, *page)).to(dtype)
    dst = torch.full((Ns, *page), 101).to(dtype)
    dst_ids = data.draw(st.lists(st.integers(0, Ns - 1), unique=True))
    src_ids = data.draw(
        st.lists(st.integers(0, P - 1), min_size=len(dst_ids), max_size=len(dst_ids))
    )
    ids = [torch.tensor(x, dtype=torch.int64) for x in (src_ids, dst_ids)]
    copy_pages(src, ids[0], dst, ids[1], impl=impl)
    came_from = dict(zip(dst_ids, src_ids, strict=True))
    for slot in range(Ns):
        expected = src[came_from[slot]] if slot in came_from else torch.full(page, 101).to(dtype)
        assert torch.equal(dst[slot], expected)


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize(("which", "bad"), [(0, 4), (0, -1), (1, 3), (1, -1)])
def test_page_out_of_range_is_refused(impl, which, bad):
    src, dst = torch.ones(4, 8), torch.zeros(3, 8)
    ids = [torch.tensor([0, 1]), torch.tensor([0, 1])]
    ids[which][1] = bad
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        copy_pages(src, ids[0], dst, ids[1], impl=impl)
    if impl != "reference" or which == 0:  # index_copy_ writes what comes before the bad id
        assert (dst == 0).all()


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("which", "bad"), [(0, 4), (0, -1), (1, 3), (1, -1), (1, 2**40)])
def test_triton_skips_pages_out_of_range(impl, which, bad):
    """Ids on the device are not seen by the host: nothing outside is read or written."""
    src, dst = torch.ones(4, 8), torch.zeros(3, 8)
    ids = [torch.tensor([0, 1]), torch.tensor([0, 1])]
    ids[which][1] = bad
    copy_pages(src, ids[0], dst, ids[1], impl=impl)
    assert dst[:, 0].tolist() == [1.0, 0.0, 0.0]


def test_within_one_pool_all_is_read_before_anything_is_written():
    pool = torch.arange(4.0).view(4, 1)
    forward, backward = torch.tensor([0, 1]), torch.tensor([1, 0])
    copy_pages(pool, forward, pool, backward)  # a swap: page after page would lose one
    assert pool.flatten().tolist() == [1.0, 0.0, 2.0, 3.0]
    with pytest.raises(ImplementationError, match="copy_pages: implementation 'native' cannot run"):
        copy_pages(pool, forward, pool, backward, impl="native")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": torch.zeros(3, 9)}, "copy_pages: dst has pages torch.float32"),
        ({"dst": torch.zeros(3, 8).half()}, "copy_pages: dst has pages torch.float16"),
        ({"dst_ids": torch.tensor([0, 1])}, "copy_pages: dst_ids has n=2, expected 1"),
        ({"src_ids": torch.tensor([0]).int()}, "copy_pages: src_ids has dtype torch.int32"),
    ],
)
def test_malformed_arguments_are_named(change, message):
    arguments = dict(
        src=torch.zeros(4, 8),
        src_ids=torch.tensor([0]),
        dst=torch.zeros(3, 8),
        dst_ids=torch.tensor([0]),
    )
    with pytest.raises(ValueError, match=message):
        copy_pages(**(arguments | change))


def test_pages_of_the_host_do_not_make_a_device_s_kernels_interpreted(monkeypatch):
    """What "auto" must not take for a call on CPU tensors: locked host pages, and ids on a device."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    here, there = torch.zeros(2, 4), torch.zeros(2, device="meta")
    for op in (triton.COPY_PAGES, triton.BUILD_DIGESTS, triton.BUILD_SIGNS):
        assert op.auto_reasons(here, there, there, there) == []
        assert "interpreted" in op.auto_reasons(here, here, here, here)[0]


# Many layers -------------------------------------------------------------------------------------


def layer_pages(layers, P, page, dtype, shift=0):
    """Layers that lie anywhere, ``shift`` elements behind where memory begins."""
    size = P * math.prod(page)
    planes = [
        torch.randint(0, 100, (size + shift,)).to(dtype)[shift:].view(P, *page)
        for _ in range(2 * layers)
    ]
    return LayerPages.of(planes[:layers], planes[layers:], "cpu")


@pytest.mark.parametrize("impl", COPY_LAYER_PAGES.names())
@given(
    dtype=st.sampled_from(DTYPES),
    page=st.sampled_from(((1,), (3, 5), (32, 2, 8), (7, 2, 96))),
    layers=st.integers(1, 4),
    P=st.integers(1, 7),
    Ns=st.integers(1, 5),
    shift=st.integers(0, 1),
    data=st.data(),
)
def test_pages_of_many_layers_go_where_the_list_says(impl, dtype, page, layers, P, Ns, shift, data):
    """Lists in any order, layers with many pages and with none, pages that are copied twice."""
    source = layer_pages(layers, P, page, dtype, shift)
    targets = st.tuples(st.integers(0, layers - 1), st.integers(0, Ns - 1))
    to = data.draw(st.lists(targets, unique=True))
    pages = data.draw(st.lists(st.integers(0, P - 1), min_size=len(to), max_size=len(to)))
    ids = torch.tensor([[layer for layer, _ in to], pages, [slot for _, slot in to]]).long()
    got, expected = ([torch.full((layers, Ns, *page), 101).to(dtype) for _ in "kv"] for _ in "ab")
    copy_layer_pages(source, ids, *got, impl=impl)
    copy_layer_pages_reference(source, ids, *expected)
    for half, planes in enumerate((source.k, source.v)):
        assert torch.equal(got[half], expected[half])
        for layer, page_id, slot in ids.T.tolist():
            assert torch.equal(got[half][layer, slot], planes[layer][page_id])
        assert int((got[half] != 101).flatten(2).any(2).sum()) == len(to), "others stay"


@pytest.mark.parametrize(("which", "bad"), [(0, 2), (0, -1), (1, 4), (1, -1), (2, 3), (2, -1)])
def test_what_is_out_of_range_in_many_layers(which, bad):
    source = layer_pages(2, 4, (8,), torch.float32)
    ids = torch.tensor([[0, 1], [1, 1], [2, 2]])
    ids[which, 1] = bad
    with pytest.raises(ValueError, match=f"copy_layer_pages: .* has {bad}, expected"):
        copy_layer_pages(source, ids, torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), impl="native")
    k, v = torch.full((2, 3, 8), 101.0), torch.full((2, 3, 8), 101.0)
    copy_layer_pages(source, ids, k, v, impl="triton")  # skips it: the host sees no ids of a device
    for half, planes in ((k, source.k), (v, source.v)):
        assert torch.equal(half[0, 2], planes[0][1])
        assert int((half != 101).flatten(1).any(1).sum()) == 1


def test_layers_that_do_not_agree_are_named():
    plane = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"v\[1\] is torch.float32\[4, 9\]"):
        LayerPages.of([plane, plane], [plane, torch.zeros(4, 9)], "cpu")
    with pytest.raises(ValueError, match=r"k\[0\] is not contiguous"):
        LayerPages.of([torch.zeros(8, 4).T], [plane], "cpu")
    with pytest.raises(ValueError, match="2 layers of K, 1 of V"):
        LayerPages.of([plane, plane], [plane], "cpu")
    source, dst = LayerPages.of([plane], [plane], "cpu"), torch.zeros(1, 3, 8)
    with pytest.raises(ValueError, match=r"ids is torch.int64\[2, 1\]"):
        copy_layer_pages(source, torch.zeros(2, 1).long(), dst, dst)
    with pytest.raises(ValueError, match="dst_v has pages torch.float16"):
        copy_layer_pages(source, torch.zeros(3, 1).long(), dst, dst.half())
    with pytest.raises(ValueError, match="expected 1 layers"):
        copy_layer_pages(source, torch.zeros(3, 1).long(), dst.expand(2, 3, 8), dst)


@pytest.mark.parametrize("impl", [x for x in COPY_LAYER_PAGES.names() if x != "reference"])
@pytest.mark.parametrize("half", ["k", "v"])
def test_kernels_refuse_to_copy_within_one_memory(impl, half):
    pool = torch.arange(32.0).view(1, 4, 8)
    planes = {"k": torch.zeros(4, 8), "v": torch.zeros(4, 8), half: pool[0]}
    source = LayerPages.of([planes["k"]], [planes["v"]], "cpu")
    ids = torch.tensor([[0], [1], [2]])
    with pytest.raises(ImplementationError, match="source and targets share memory"):
        copy_layer_pages(source, ids, pool, torch.zeros(1, 4, 8), impl=impl)
    with pytest.raises(ImplementationError, match="source and targets share memory"):
        copy_layer_pages(source, ids, torch.zeros(1, 4, 8), pool, impl=impl)
    assert torch.equal(pool.flatten(), torch.arange(32.0))
    copy_layer_pages(source, ids, torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), impl=impl)
