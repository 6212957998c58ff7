"""Copies of pages and of single tokens: appended, recalled, staged, and into pages of one head."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import FP8
from implementations import implementations, name_of
from sglang_scout.ops import pages as ops
from sglang_scout.ops.pages import LayerPages, Pool

APPENDS, COPIES, STAGES = map(
    implementations, (ops.append_tokens, ops.copy_layer_pages, ops.stage_pages)
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ANY = (*DTYPES, torch.uint8, torch.int16)
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


@APPENDS
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
    impl(k, v, lens, to, mirror)
    for got, (want_k, want_v) in zip((to, mirror), want, strict=False):
        assert torch.equal(got.k.float(), want_k.float())
        assert torch.equal(got.v.float(), want_v.float())


def every_16_bits(of):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(of)


def many_32_bits():
    rng = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=rng).to(torch.int32)
    x = bits.view(torch.float32)
    x[: 2**15] = torch.randn(2**15) * 2.0 ** torch.randint(-18, 18, (2**15,))
    return x


@APPENDS
@pytest.mark.parametrize("dtype", (torch.bfloat16, *FP8))
@pytest.mark.parametrize("of", DTYPES)
def test_rounds_every_value_as_torch_does(impl, dtype, of):
    """Including values out of range and NaN."""
    k = (many_32_bits() if of == torch.float32 else every_16_bits(of)).view(8, 64, 128)
    to = pool(torch.Generator(), list(range(8)), 8, 1, 64, 128, dtype)
    impl(k, k, torch.ones(8, dtype=torch.int32), to)
    got, wanted = (x.float() for x in (to.k[:, 0], k.to(dtype)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@implementations(ops.append_tokens, only=("triton",))
@pytest.mark.parametrize(("page", "length"), [(4, 1), (LAST_INT32, 1), (3, 9), (3, 0)])
def test_triton_skips_what_would_write_outside(impl, page, length):
    to = pool(torch.Generator(), [page, 2], 4, 8, 2, 16, torch.float32)
    before = to.k.clone()
    k = torch.ones(2, 2, 16)
    impl(k, k, torch.tensor([length, 1], dtype=torch.int32), to)
    before[2, 0] = 1.0
    assert torch.equal(to.k, before)


@COPIES
@given(
    dtype=st.sampled_from(ANY),
    page=st.sampled_from(((1, 1, 1), (3, 1, 5), (32, 2, 8), (7, 2, 96))),
    L=st.integers(1, 4),
    P=st.integers(1, 9),
    Ns=st.integers(1, 9),
    shift=st.integers(0, 1),
    data=st.data(),
)
def test_named_pages_are_copied_and_others_untouched(
    impl, layer_pages, dtype, page, L, P, Ns, shift, data
):
    """Lists in any order, layers with many pages or none, pages copied twice; a negative page is none."""
    halves = torch.randint(0, 100, (2, L, P, *page)).to(dtype)
    targets = st.tuples(st.integers(0, L - 1), st.integers(0, Ns - 1))
    to = data.draw(st.lists(targets, unique=True))
    pages = data.draw(st.lists(st.integers(-1, P - 1), min_size=len(to), max_size=len(to)))
    ids = torch.tensor([[layer for layer, _ in to], pages, [slot for _, slot in to]]).long()
    got, expected = ([torch.full((L, Ns, *page), 101).to(dtype) for _ in "kv"] for _ in "ab")
    impl(layer_pages(*halves, shift=shift), ids, *got)
    for half in range(2):
        for layer, page_id, slot in ids.T.tolist():
            if page_id >= 0:
                expected[half][layer, slot] = halves[half, layer, page_id]
        assert torch.equal(got[half], expected[half])


@implementations(ops.copy_layer_pages, only=("native", "triton"))
@pytest.mark.parametrize(("which", "bad"), [(0, 2), (0, -1), (1, 4), (2, 3), (2, -1), (2, 2**40)])
def test_what_is_out_of_range_is_refused_and_by_triton_skipped(impl, which, bad, layer_pages):
    """The host cannot check ids on the device: nothing out of bounds is read or written."""
    ids = torch.tensor([[0, 1], [1, 1], [2, 2]])
    ids[which, 1] = bad
    to = torch.zeros(2, 2, 3, 1, 1, 8)
    arguments = layer_pages(torch.ones(2, 4, 1, 1, 8)), ids, *to
    if name_of(impl) == "triton":
        impl(*arguments)
        assert (to[:, 0, 2] == 1).all() and to.sum() == 16
    else:
        with pytest.raises(ValueError, match=f"copy_layer_pages: .* has {bad}, expected"):
            impl(*arguments)
        assert (to == 0).all()


def test_layers_that_do_not_agree_are_named():
    page = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"v\[1\] is torch.float32\[4, 9\]"):
        LayerPages.of([page, page], [page, torch.zeros(4, 9)], "cpu")
    with pytest.raises(ValueError, match=r"v\[0\] is .*, strides .*, expected .*, contiguous"):
        LayerPages.of([page], [torch.zeros(8, 4).T], "cpu")
    with pytest.raises(ValueError, match="2 layers of K, 1 of V"):
        LayerPages.of([page, page], [page], "cpu")


@STAGES
@given(
    dtype=st.sampled_from(ANY),
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
    halves = torch.randint(0, 100, (2, 2, 6, S, H, D)).to(dtype)
    rows = requests * lists
    ids = data.draw(st.lists(st.integers(-1, 5), min_size=rows * k, max_size=rows * k))
    pages = torch.tensor(ids, dtype=torch.int32).view(rows, k)
    layer = data.draw(st.integers(0, 1))
    size = rows * k + spare, S, H // lists, D
    got, expected = ([torch.full(size, 101).to(dtype) for _ in "kv"] for _ in "ab")
    impl(layer_pages(*halves, shift=shift), layer, pages, *got)
    for half in range(2):
        for entry, page_id in enumerate(ids):
            if page_id >= 0:
                head = entry // k % lists
                heads = slice(head, head + 1) if lists > 1 else slice(None)
                expected[half][entry] = halves[half, layer, page_id][:, heads]
        assert torch.equal(got[half], expected[half])


def test_cpp_refuses_what_it_would_read_or_write_outside(layer_pages):
    source, pages = layer_pages(*torch.ones(2, 2, 4, 8, 4, 2)), torch.zeros(3, 2, dtype=torch.int32)
    slots, ids = torch.zeros(6, 8, 2, 2), torch.zeros(3, 1, dtype=torch.int64)
    stage, copy = ops._stage_pages_native, ops._copy_layer_pages_native
    for call, arguments, message in (
        (stage, (source, 0, pages, slots[:5], slots[:5]), "more entries than slots"),
        (stage, (source, 0, pages, slots, slots), "lists are not whole requests"),
        (
            stage,
            (source, 0, pages[:2] + 4, slots, slots),
            r"pages has 4, expected values in \[0, 4\)",
        ),
        (copy, (source, ids, *torch.zeros(2, 1, 3, 8, 4, 2)), "number of layers"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)


@implementations(ops.copy_tokens)
@pytest.mark.parametrize("dtype", (*DTYPES, *FP8))
def test_tokens_of_a_head_come_to_their_places(layer_pages, impl, dtype):
    S, rng = 32, torch.Generator().manual_seed(2)
    k, v = (torch.randn(3, 5, S, 2, 16, generator=rng).to(dtype) for _ in "kv")
    source = layer_pages(k, v)
    target = LayerPages.of(
        *([torch.zeros(4, S, 16, dtype=dtype) for _ in range(3)] for _ in "kv"), "cpu"
    )
    layers = torch.tensor([0, 0, 2, 2, 2])
    page, token, head = torch.tensor([[4, 0, 1, 1, 3], [31, 0, 5, 5, 9], [1, 0, 0, 1, 1]])
    to = torch.tensor([0, 127, 33, 34, 2])
    impl(source, torch.stack([layers, (page * S + token) * 2 + head, to]), target)
    for of, copies in ((k, target.k), (v, target.v)):
        for i in range(5):
            row = copies[layers[i]].flatten(0, 1)[to[i]]
            assert torch.equal(row, of[layers[i], page[i], token[i], head[i]])
        assert sum(int((x != 0).any(-1).sum()) for x in copies) == 5
