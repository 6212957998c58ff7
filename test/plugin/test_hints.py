"""How a prompt's hint is computed and sent."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sending import ONLY_K_AND_V, lists, sent, transfers
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.hints import HINT_PAGES
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.plugin import pool
from sglang_scout.plugin import prefill as hooks
from sglang_scout.plugin.prefill import LastQueries
from sglang_scout.policy.base import SelectionRule

SIZE = 32
SHAPE = ModelShape(3, 4, 2, 64, SIZE, torch.float32, 0.125)


@pytest.mark.parametrize("kind_there", ["minmax", "rotated-2"])
@pytest.mark.parametrize("hints_there, chunk_is_last", [(True, True), (True, False), (False, True)])
def test_a_hint_is_sent_with_the_last_chunk_if_both_have_them(
    kind_there, hints_there, chunk_is_last
):
    here = DigestPool(SHAPE, 4, "cpu", "minmax", hints=True)
    if chunk_is_last:
        here.hints.put(3, np.zeros((3, HINT_PAGES), np.int32))
    there = DigestPool(SHAPE, 90, "cpu", kind_there, hints=hints_there)
    target = pool.with_digests(([50, 51, 52, 60, 61, 62], [1] * 6, [0] * 6), there)[0]
    pairs = sent(pool.with_digests(lists(), here), target)
    if kind_there != "minmax":
        assert pairs == ONLY_K_AND_V
    elif not (hints_there and chunk_is_last):
        assert len(pairs) == 12
    else:
        *pairs, hints = pairs
        assert len(pairs) == 12 and len(hints) == 6
        assert hints == [
            (mine[i].data_ptr(), theirs[i].data_ptr(), HINT_PAGES)  # of 2 bytes, in two parts
            for mine, theirs in zip(here.hints.parts, there.hints.parts, strict=True)
            for i in range(3)
        ]
    stock = transfers(lists()[0], target, lists()[2])
    assert stock == ONLY_K_AND_V, "from a prefill server without the flag"


def test_the_hint_is_what_the_last_tokens_queries_choose(monkeypatch):
    """Two chunks; the first one's last query selects other pages."""
    keys = [0.1 * torch.randn(9 * SIZE, 2, 64) for _ in range(3)]
    wanted = torch.tensor([8, 2, 7])  # page of each layer, with a key that stands out
    for of_layer, page in zip(keys, wanted, strict=True):
        of_layer[page * SIZE + 30] *= 10
    digests = DigestPool(SHAPE, 9, "cpu", "minmax", hints=True)
    request = SimpleNamespace(
        rid="r",
        disagg_kv_sender=SimpleNamespace(),
        start_send_idx=0,
        origin_input_ids=[0] * (7 * SIZE + 1),
    )
    request.disagg_kv_sender = SimpleNamespace()
    monkeypatch.setattr(hooks.adapter, "row_of", lambda req: 0)
    monkeypatch.setattr(hooks.adapter, "extend_end", lambda req: 7 * SIZE + 1)
    monkeypatch.setattr(hooks, "DigestKVPool", SimpleNamespace)
    kv = SimpleNamespace(
        page_size=SIZE,
        device="cpu",
        digests=digests,
        rule=SelectionRule(kind="minmax", head_reduce="max"),
        host_pages=HostPages(SHAPE, keys, keys),
        shape=SHAPE,
        last_queries=LastQueries(),
    )
    order = torch.tensor([3, 1, 8, 2, 7, 5, 4, 6])
    locations = (order[:, None] * SIZE + torch.arange(SIZE)).flatten()
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv),
        req_to_token_pool=SimpleNamespace(req_to_token=locations[None]),
    )
    heard = []
    backend = SimpleNamespace(forward_extend=lambda *args: heard.append(args))
    kv.last_queries.listen_to(backend)
    for chunk, tokens in ((0, 4 * SIZE), (1, 3 * SIZE + 1)):
        lens = SimpleNamespace(rids=["other", "r"], extend_seq_lens_cpu=[5, tokens])
        for layer in range(3):
            q = torch.randn(5 + tokens, 4, 64)
            for head in range(4):
                q[-1, head] = (
                    99 * keys[layer][wanted[layer] * SIZE + 30, head // 2] * (2 * chunk - 1)
                )
            of = SimpleNamespace(layer_id=layer, tp_q_head_num=4, qk_head_dim=64)
            backend.forward_extend(q.flatten(1), None, None, of, lens)
    assert len(heard) == 6
    hooks.before_send_kv_chunk(scheduler, request, end_idx=4 * SIZE)
    assert digests.hints.of(6, 7) is None
    request.start_send_idx = 4 * SIZE
    hooks.before_send_kv_chunk(scheduler, request, last_chunk=True)
    hint = digests.hints.of(6, 7)
    assert digests.valid[order[:7]].all() and not digests.valid[6]
    assert (np.sort(hint[:, :7]) == np.arange(7)).all() and (hint[:, 7:] == -1).all()
    assert order[hint[:, 2]].tolist() == wanted.tolist(), (
        "first behind the first and the newest page"
    )
