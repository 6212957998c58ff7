import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops import triton
from sglang_scout.ops.gather import COPY_PAGES, copy_pages

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
