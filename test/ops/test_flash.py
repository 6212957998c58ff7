"""FlashAttention-3 instead of our kernel: the arguments it gets, with a plain stand-in for the library."""

import pytest
import torch

from sglang_scout.ops import flash
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.flash import pack_pages

S, P = 4, 12


def inputs(seed, B=5, R=37):
    rng = torch.Generator().manual_seed(seed)
    pages = torch.randint(-1, 20, (B, R), generator=rng, dtype=torch.int32)
    slot_of = torch.randint(-3, P, (20,), generator=rng, dtype=torch.int32)
    n_pages = torch.tensor([R, 0, 1, 20, R], dtype=torch.int32)
    pages.masked_fill_(torch.arange(R) >= n_pages[:, None], -1)
    last_page = torch.tensor([3, 0, -1, 11, -1], dtype=torch.int32)
    return pages, last_page, torch.tensor([1, 4, 2, 3, 4], dtype=torch.int32), slot_of, n_pages


@pytest.mark.parametrize("impl", pack_pages.names())
@pytest.mark.parametrize("seed", [1, 2])
def test_pages_are_packed_in_order_with_the_last_one_behind(impl, seed):
    pages, last_page, last_len, slot_of, n_pages = inputs(seed)
    table, tokens = pack_pages(pages, last_page, last_len, S, slot_of, n_pages, impl=impl)
    for row in range(len(pages)):
        slots = [int(slot_of[p]) for p in pages[row].tolist() if p >= 0 and slot_of[p] >= 0]
        tail = [int(last_page[row])] if last_page[row] >= 0 else []
        assert table[row].tolist() == (slots + tail + [0] * 38)[:38]
        assert tokens[row] == S * len(slots) + (int(last_len[row]) if tail else 0)
    plain, tokens = pack_pages(pages, None, None, S, impl=impl)
    assert tokens.tolist() == [S * sum(p >= 0 for p in row) for row in pages.tolist()]
    assert plain.shape == table.shape


def plainly(q, k, v, page_table, cache_seqlens, softmax_scale, return_softmax_lse):
    """FlashAttention-3's interface, one request at a time."""
    assert q.shape[1] == 1 and return_softmax_lse
    assert page_table.is_contiguous() and page_table.dtype == cache_seqlens.dtype == torch.int32
    found, lse = torch.zeros_like(q), torch.full((len(q), q.shape[2], 1), -torch.inf)
    for b, tokens in enumerate(cache_seqlens.tolist()):
        if tokens:
            keys, values = (x[page_table[b].long()].flatten(0, 1)[:tokens, None] for x in (k, v))
            of = [x.permute(1, 0, 2, 3) for x in (keys, values)]
            got = attend_pages.reference(
                q[b], *of, torch.zeros(1, 1).int(), None, None, softmax_scale
            )
            found[b, 0], lse[b, :, 0] = got[0].to(q.dtype)[0], got[1][0]
    return found, lse


def test_equals_the_reference_up_to_the_rounding_of_its_result(monkeypatch):
    monkeypatch.setattr(flash, "library", lambda: plainly)
    q, k, v = (torch.randn(*x).bfloat16() for x in ((5, 6, 16), (P, S, 2, 16), (P, S, 2, 16)))
    pages, *last, slot_of, n_pages = inputs(3)
    rest = pages, *last, 0.25
    found, lse = flash.attend(q, k, v, *rest, slot_of, n_pages)
    expected = attend_pages.reference(q, k, v, *rest, slot_of, n_pages)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected[0], atol=2**-8, rtol=2**-8)
    torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)


def test_says_why_it_cannot_run(monkeypatch):
    q, k = torch.randn(1, 4, 16), torch.randn(3, S, 2, 16)
    pages = torch.zeros(2, 1, dtype=torch.int32)
    reasons = attend_pages.reasons(q, k, k, pages, None, None, 1.0)["flash"]
    assert reasons == ["q is on cpu; flash supports cuda", "C=2; flash supports up to 1"]
    assert "flash supports one dtype of 16 bits" in flash.unless({"q": q, "k": k})

    def absent():
        raise ImportError("Can not import FA3")

    narrow = {"q": q.bfloat16(), "k": k.bfloat16()}
    for major, library, reason in (
        (8, absent, "compute capability 8.0; flash supports 9.x"),
        (9, absent, "sgl_kernel: Can not import FA3"),  # the package is there, its kernels are not
        (9, lambda: None, ""),
    ):
        capability = (major, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, x=capability: x)
        monkeypatch.setattr(flash, "library", library)
        assert flash.unless(narrow) == reason
