"""Moving averages of attention weights, and the tokens kept by them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend_cases import FP8
from far_pages import COUNT, KV_AT, QUERY, TABLE, ZERO, D, H, N, S, equal, pool, random
from implementations import implementations
from sglang_scout.ops import triton
from sglang_scout.ops.attend import attend_pages
from sglang_scout.policy.hgca import kernels
from sglang_scout.policy.hgca.kept_tokens import decay_mass, select_salient

ALPHA = 0.1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8)


def weights(q, k, scale):
    """[H, T] float64: the largest softmax weight of a group's query heads."""
    group = q.shape[0] // k.shape[1]
    s = torch.einsum("qd,tqd->qt", q.double(), k.double().repeat_interleave(group, 1)) * scale
    return s.softmax(1).view(-1, group, len(k)).amax(1)


@implementations(decay_mass)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 6)),
    D=st.sampled_from((16, 64, 80, 128)),
    seed=st.integers(0, 2**31),
)
def test_the_average_is_that_of_the_weights_within_the_window(agree, impl, dtype, sizes, D, seed):
    (B, W, H, G), rng = sizes, torch.Generator().manual_seed(seed)
    N, P, scale = max(1, W - 1 + seed % 3), B * W + 2, D**-0.5

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    k = torch.randn(P, S, H, D, generator=rng).to(dtype)
    q = torch.randn(B, H * G, D, generator=rng)
    slot_of = torch.randperm(P, generator=rng).int()
    n_pages, last_len = ints(0, W, B), ints(1, S + 1, B)
    first_at, fresh = ints(0, W, B), ints(0, 2, B)
    pages, last_page = ints(0, B * W, B, N), slot_of[B * W :][ints(0, 2, B).long()]
    pages[torch.arange(N) >= n_pages[:, None]] = -1
    state = torch.randperm(B + 1, generator=rng)[:B].int()
    state[ints(0, 4, B) == 0] = -1
    maw = torch.rand(B + 1, W, H, S, generator=rng)
    _, lse = attend_pages(q, k, k, pages, last_page, last_len, scale, slot_of=slot_of)
    expected = maw.double().clone()
    for b in (state >= 0).nonzero().flatten().tolist():
        n, length = int(n_pages[b]), int(last_len[b])
        parts = [k[slot_of[page]] for page in pages[b, :n]] + [k[last_page[b], :length]]
        a = weights(q[b], torch.cat(parts), scale)
        for column, part in enumerate(a.split([S] * n + [length], 1)):
            moved = expected[state[b], (first_at[b] + column) % W, :, : part.shape[1]]
            newest = part[:, -1].clone() if column == n else None
            moved.copy_(part if fresh[b] else (1 - ALPHA) * moved + ALPHA * part)
            if newest is not None:
                moved[:, -1] = newest
    window = pages, n_pages, slot_of, last_page, last_len, first_at
    impl(q, lse, k, *window, state, fresh, maw, ALPHA, scale)
    agree(decay_mass, maw, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_salient_tokens_have_more_than_their_share_for_some_query_head(dtype):
    rng = torch.Generator().manual_seed(1)
    k, q = torch.randn(300, S, 2, 16, generator=rng).to(dtype), torch.randn(6, 16, generator=rng)
    pages = torch.randperm(300, generator=rng)[:270]  # more than one chunk
    heads, tokens, salience = select_salient(q, k, pages, 1.5, 0.25)
    ids = (pages[:, None] * S + torch.arange(S)).flatten()
    a = weights(q, k[pages].flatten(0, 1), 0.25) * len(ids)
    for head in range(2):
        clear = (a[head] - 1.5).abs() > 1e-6 * 1.5
        kept = torch.isin(ids, tokens[heads == head])
        assert torch.equal(kept[clear], (a[head] > 1.5)[clear]) and 0 < kept.sum() < len(ids)
        assert torch.equal(tokens[heads == head], ids[kept])
        found = salience[heads == head].double()
        torch.testing.assert_close(found, a[head][kept], rtol=1e-5, atol=0)
    assert all(len(x) == 0 for x in select_salient(q, k, pages[:0], 1.5, 0.25))
    assert len(select_salient(q, k, pages, torch.inf, 0.25)[0]) == 0
    assert len(select_salient(q, k, pages, 0.0, 0.25)[0]) == 2 * len(ids)


@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_reads_of_pages_beyond_32_bits():
    """As test/ops/test_far_pages.py."""
    k, lse = pool(KV_AT, S, H, D), ZERO + random(1, 2)
    far, near = (torch.zeros(1, 4, H, S) for _ in range(2))
    for pages, at, maw in ((k, KV_AT, far), (k[KV_AT:], 0, near)):
        slot_of = torch.arange(N, dtype=torch.int32) + at
        window = TABLE[:, :2], COUNT - 1, slot_of, ZERO + 1 + at, COUNT
        kernels.decay_mass(QUERY, lse, pages, *window, ZERO, ZERO, ZERO, maw, 0.1, 0.25)
    equal(far, near)
