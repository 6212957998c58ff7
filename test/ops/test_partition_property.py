"""Split a request's pages at random between GPU part, CPU part and nothing: attending to both parts
and merging gives dense attention over their union."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attend_cases import densely
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.merge import merge_states

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU, CPU, NOTHING = 0, 1, 2


def packed(rows, k):
    """Lists of page ids as [B, k] int32, padded with -1."""
    return torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32).view(
        -1, k
    )


# The part of each page of each request: rows may be empty, and all may go to one part.
assignments = st.lists(
    st.lists(st.sampled_from((GPU, CPU, NOTHING)), min_size=0, max_size=10), min_size=1, max_size=4
)


@pytest.mark.parametrize("cpu_impl", attend_pages.names())
@settings(max_examples=40)
@given(
    where=assignments,
    tail_lens=st.lists(st.integers(0, 8), min_size=4, max_size=4),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from(((1, 1), (2, 3), (4, 2), (2, 8))),
    D=st.sampled_from((16, 64, 96, 128)),
    spread=st.sampled_from((0.1, 1.0, 5.0)),
    seed=st.integers(0, 2**31),
)
@example([[]], [0] * 4, torch.float32, (2, 3), 64, 1.0, 0).via("both parts empty")
@example([[NOTHING] * 3, [CPU], [GPU]], [0] * 4, torch.float32, (2, 3), 64, 1.0, 0).via(
    "each alone"
)
@example([[CPU] * 3], [5] * 4, torch.bfloat16, (2, 3), 64, 1.0, 0).via("GPU has the tail only")
def test_merged_parts_equal_dense_attention_over_the_union(
    agree, cpu_impl, where, tail_lens, dtype, heads, D, spread, seed
):
    S, (H, G), scale = 8, heads, D**-0.5
    B, rng = len(where), torch.Generator().manual_seed(seed)
    P = sum(len(row) for row in where) + B + 1
    k, v = (torch.randn(P, S, H, D, generator=rng).to(dtype) for _ in range(2))
    q = torch.randn(B, H * G, D, generator=rng) * spread
    ids = iter(torch.randperm(P, generator=rng).tolist())
    parts = [[(next(ids), place) for place in row] for row in where]
    tails = [(next(ids), n) if n else (-1, 0) for n in tail_lens[:B]]
    unwritten = next(ids)
    k[unwritten], v[unwritten] = torch.nan, torch.nan
    for page, n in tails:  # a partial page: memory after its tokens is unwritten
        if n:
            k[page, n:], v[page, n:] = torch.nan, torch.nan

    pages = {
        place: packed([[page for page, p in row if p == place] for row in parts], 10)
        for place in (GPU, CPU)
    }
    tail_page, tail_len = torch.tensor(tails, dtype=torch.int32).T.contiguous()
    resident = attend_pages(q, k, v, pages[GPU], tail_page, tail_len, scale, impl="reference")
    missing = attend_pages(q, k, v, pages[CPU], None, None, scale, impl=cpu_impl)
    merged = merge_states(*resident, *missing)

    union = packed([[page for page, p in row if p != NOTHING] for row in parts], 10)
    expected = densely(q, k, v, union, tail_page, tail_len, scale)
    agree(attend_pages, merged, expected, dtype)
