"""Kept tokens of every request, against plain lists of them."""

import numpy as np
import pytest
import torch

from sglang_scout.engine.context_cache import ContextCache
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.ops.layers import LayerPages
from sglang_scout.policy.base import RESULT_DELAY_STEPS

L, P, S, H, D = 2, 9, 32, 2, 16


def pool(pages=12, **limits):
    shape = ModelShape(L, 4, H, D, S, torch.float32, 1.0)
    halves = ([torch.randn(P * S, H, D) for _ in range(L)] for _ in "kv")
    context = [[torch.zeros(pages, S, D) for _ in range(L)] for _ in "kv"]
    host = HostPages(shape, *halves, context=LayerPages.of(*context, "cpu"))
    cache = ContextCache(host, row_pages=6, **limits)
    cache.begin_step()
    return host, context, cache


def random_tokens(rng, most=70):
    """Sorted by layer and head, as they are added."""
    chosen = [
        (layer, head, token)
        for layer in range(L)
        for head in range(H)
        for token in rng.choice(P * S, rng.integers(0, most), replace=False).tolist()
    ]
    return np.array(chosen, np.int64).reshape(-1, 3).T


def contents(host, context, cache, kept, layer, head):
    """Host tokens of a list, identified by K, with V checked."""
    ids, n_pages = cache.worker_ids(kept)
    assert (ids[layer, head, n_pages[layer, head] :] == -1).all()
    found = []
    for i in ids[layer, head, : n_pages[layer, head]] - P:
        page, count = divmod(int(i), S)
        for at in range(count + 1):
            k, v = (half[layer][page, at] for half in context)
            same = (host.k[layer][:, :, head].flatten(0, 1) == k).all(1).nonzero()
            found.append(int(same))
            assert torch.equal(host.v[layer][:, :, head].flatten(0, 1)[found[-1]], v)
    return found


@pytest.mark.parametrize("limits", [{"cap_tokens": 40}, {"pages": 5}, {"cap_tokens": 10**9}])
def test_a_full_list_leaves_out_what_comes_last(limits):
    host, context, cache = pool(**limits)
    layers, heads = (np.array(x).repeat(250) for x in ([0, 0, 1], [0, 1, 1]))
    tokens = np.tile(np.arange(250), 3)
    kept = cache.empty()
    full = cache.add(kept, layers, heads, tokens)
    most = {40: 40, None: 160, 10**9: 192}[limits.get("cap_tokens")]
    left_over = 0 if "pages" in limits else most  # in the same layer the first list has taken all
    assert kept.tokens.tolist() == [[most, left_over], [0, most]]
    assert full.tolist() == [[True, True], [False, True]]
    for layer, head in ((0, 0), (1, 1)):
        assert contents(host, context, cache, kept, layer, head) == list(range(most))


def test_pages_of_a_request_that_ended_come_back_when_no_step_may_read_them():
    _, _, cache = pool()
    kept = cache.empty()
    cache.add(kept, *random_tokens(np.random.default_rng(1)))
    used = cache.used_pages
    cache.begin_step()
    cache.release(kept)
    for _ in range(RESULT_DELAY_STEPS):
        assert cache.used_pages == used > 0
        cache.begin_step()
    assert cache.used_pages == 0
    again = cache.empty()
    cache.add(again, *random_tokens(np.random.default_rng(1)))
    assert cache.used_pages == used
