import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.ops.pages import stage_pages

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@pytest.mark.parametrize("impl", stage_pages.names())
@given(
    dtype=st.sampled_from(DTYPES),
    page=st.sampled_from(((1, 1, 1), (3, 2, 5), (32, 4, 8), (7, 6, 96))),
    by_head=st.booleans(),
    requests=st.integers(0, 3),
    k=st.integers(1, 5),
    spare=st.integers(0, 2),
    shift=st.integers(0, 1),
    data=st.data(),
)
def test_each_entry_comes_to_its_slot(
    impl, layer_pages, dtype, page, by_head, requests, k, spare, shift, data
):
    """Lists with gaps, pages in several lists; slots without an entry are unchanged."""
    S, H, D = page
    lists = H if by_head else 1
    if by_head and H > 1 and impl == "native":
        return  # it refuses: it copies whole pages
    halves = torch.randint(0, 100, (2, 2, 6, S, H, D)).to(dtype)
    rows = requests * lists
    ids = data.draw(st.lists(st.integers(-1, 5), min_size=rows * k, max_size=rows * k))
    pages = torch.tensor(ids, dtype=torch.int32).view(rows, k)
    layer = data.draw(st.integers(0, 1))
    size = rows * k + spare, S, H // lists, D
    got, expected = ([torch.full(size, 101).to(dtype) for _ in "kv"] for _ in "ab")
    stage_pages(layer_pages(*halves, shift=shift), layer, pages, *got, impl=impl)
    for half in range(2):
        for entry, page_id in enumerate(ids):
            if page_id >= 0:
                head = entry // k % lists
                heads = slice(head, head + 1) if lists > 1 else slice(None)
                expected[half][entry] = halves[half, layer, page_id][:, heads]
        assert torch.equal(got[half], expected[half])


def test_sizes_that_do_not_fit_are_named(layer_pages):
    source, pages = layer_pages(*torch.ones(2, 2, 4, 8, 4, 2)), torch.zeros(3, 2, dtype=torch.int32)
    slots = torch.zeros(6, 8, 2, 2)
    with pytest.raises(ValueError, match=r"layer is 2, expected a value in \[0, 2\)"):
        stage_pages(source, 2, pages, slots, slots)
    with pytest.raises(ValueError, match="there are 5 slots for 3 lists of 2 pages"):
        stage_pages(source, 0, pages, slots[:5], slots[:5])
    with pytest.raises(ValueError, match="3 lists of 2 of 4 heads each do not make whole requests"):
        stage_pages(source, 0, pages, slots, slots)
