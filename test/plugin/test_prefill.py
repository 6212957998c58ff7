"""What a prefill server adds: hints, room for digests, prefill on a CPU; and noise in place of its KV."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention import torch_native_backend as torch_native

from page_weights import rule_of
from sglang_scout.core.flags import parse_config
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.requests import PageHints
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.plugin import prefill
from sglang_scout.plugin.backend import DummyKV

SIZE = 32
SHAPE = ModelShape(3, 4, 2, 64, SIZE, torch.float32, 0.125)


def test_the_hint_is_what_the_last_tokens_queries_choose(monkeypatch):
    """Two chunks; the first one's last query selects other pages."""
    keys = [0.1 * torch.randn(9 * SIZE, 2, 64) for _ in range(3)]
    wanted = torch.tensor([8, 2, 7])  # page of each layer, with a key that stands out
    for of_layer, page in zip(keys, wanted, strict=True):
        of_layer[page * SIZE + 30] *= 10
    digests = DigestPool(SHAPE, 9, "cpu", rule_of("minmax"), PageHints(SHAPE, 9))
    prompt, sender = [0] * (7 * SIZE + 1), SimpleNamespace()
    request = SimpleNamespace(rid="r", disagg_kv_sender=sender, origin_input_ids=prompt)
    request.start_send_idx = 0
    monkeypatch.setattr(prefill.adapter, "row_of", lambda req: 0)
    monkeypatch.setattr(prefill.adapter, "extend_end", lambda req: 7 * SIZE + 1)
    monkeypatch.setattr(prefill, "DigestKVPool", SimpleNamespace)
    kv = SimpleNamespace(page_size=SIZE, device="cpu", digests=digests, shape=SHAPE)
    kv.rule, kv.host_pages = rule_of("minmax"), HostPages(SHAPE, keys, keys)
    order = torch.tensor([3, 1, 8, 2, 7, 5, 4, 6])
    locations = (order[:, None] * SIZE + torch.arange(SIZE)).flatten()
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv),
        req_to_token_pool=SimpleNamespace(req_to_token=locations[None]),
    )
    heard = []
    backend = SimpleNamespace(forward_extend=lambda *args: heard.append(args))
    kv.last_queries = prefill.LastQueries(backend)
    for chunk, tokens in ((0, 4 * SIZE), (1, 3 * SIZE + 1)):
        lens = SimpleNamespace(rids=["other", "r"], extend_seq_lens_cpu=[5, tokens])
        for layer in range(3):
            q = torch.randn(5 + tokens, 4, 64)
            best = keys[layer][wanted[layer] * SIZE + 30]
            q[-1] = 99 * best.repeat_interleave(2, 0) * (2 * chunk - 1)
            of = SimpleNamespace(layer_id=layer, tp_q_head_num=4, qk_head_dim=64)
            backend.forward_extend(q.flatten(1), None, None, of, lens)
    assert len(heard) == 6
    prefill.before_send_kv_chunk(scheduler, request, end_idx=4 * SIZE)
    assert digests.hints.of(6, 7) is None
    request.start_send_idx = 4 * SIZE
    prefill.before_send_kv_chunk(scheduler, request, last_chunk=True)
    hint = digests.hints.of(6, 7)
    assert digests.valid[order[:7]].all() and not digests.valid[6]
    assert (np.sort(hint[:, :7]) == np.arange(7)).all() and (hint[:, 7:] == -1).all()
    third = order[hint[:, 2]].tolist()  # behind the first and the newest page
    assert third == wanted.tolist()


@pytest.mark.parametrize("keys", [{}, {"prefill_digests": False}])
def test_pages_and_digests_of_a_prefill_server_share_what_sglang_found(monkeypatch, keys):
    config = parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048, config=keys)
    monkeypatch.setattr(prefill, "parse", lambda args: config)
    monkeypatch.setattr(prefill, "model_shape", lambda runner: SHAPE)
    found, runner = 40 << 30, SimpleNamespace(server_args=None)
    got = prefill.around_profile_available_bytes(lambda runner, before: found, runner, 0)
    page_bytes = 2 * SHAPE.page_bytes * SHAPE.num_layers
    num_pages = got // page_bytes
    held = DigestPool(SHAPE, 1, "cpu", rule_of(config.digest)).parts
    digests = sum(part.nbytes for part in held) if config.prefill_digests else 0
    assert num_pages * (page_bytes + digests) <= found < (num_pages + 1) * (page_bytes + digests)


ORIGINAL = torch_native.TorchNativeAttnBackend._run_sdpa_forward_extend


def run(function, lengths, *, dtype, heads, kv_heads=2):
    """Rows [T, HQ, D] for sequences of (cached, new) tokens in shuffled slots."""
    rng = torch.Generator().manual_seed(7)
    totals = [cached + new for cached, new in lengths]
    slots = torch.randperm(sum(totals) + 5, generator=rng)
    table = torch.zeros(len(lengths) + 2, max(totals), dtype=torch.int64)
    for i, total in enumerate(totals):
        table[i + 1, :total] = slots[sum(totals[:i]) : sum(totals[: i + 1])]
    caches = torch.randn(2, len(slots), kv_heads, 64, generator=rng).to(dtype)
    query = torch.randn(sum(new for _, new in lengths), heads, 64, generator=rng).to(dtype)
    counts = (torch.tensor(x) for x in (totals, *zip(*lengths, strict=True)))
    of_sequences = table, torch.arange(len(lengths)) + 1, *counts, None
    options = {"scaling": 0.125, "enable_gqa": True, "causal": True}
    return function(
        None, query, torch.full_like(query, torch.nan), *caches, *of_sequences, **options
    )


@pytest.mark.parametrize(
    ("mask_elements", "heads", "dtype", "tolerance"),
    [
        (prefill.MASK_ELEMENTS, 2, torch.float32, 1e-5),
        (100, 4, torch.float32, 1e-5),
        (1, 4, torch.bfloat16, 2e-2),
    ],
)
def test_the_rows_are_those_of_sglang(monkeypatch, mask_elements, heads, dtype, tolerance):
    monkeypatch.setattr(prefill, "MASK_ELEMENTS", mask_elements)
    lengths = [(0, 9), (50, 7), (64, 1), (3, 30), (31, 33), (200, 64)]
    calls: list[list[int]] = []

    def original(*args, **options):
        calls.append(args[7].tolist())
        return ORIGINAL(*args, **options)

    hooked = functools.partial(prefill.around_extend, original)
    got, expected = (run(f, lengths, heads=heads, dtype=dtype) for f in (hooked, ORIGINAL))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert calls == [[9], [33], [64]], "mostly new tokens: the original is the faster one"


def filled(pages, prompt):
    planes = [torch.zeros(64 * 32, 1, 8, dtype=torch.bfloat16) for _ in range(4)]
    host = HostPages(ModelShape(2, 2, 1, 8, 32, torch.bfloat16, 1.0), planes[:2], planes[2:])
    pages = np.array(pages)
    DummyKV(host).fill(pages, prompt)
    outside = np.setdiff1d(np.arange(64), pages)
    assert all(not t[outside].any() for t in host.k + host.v)
    return torch.stack([t[pages] for t in host.k + host.v]).float()


def test_noise_depends_on_prompt_and_position_and_on_nothing_else():
    here, there = filled([5, 9, 2], [1, 2, 3]), filled([60, 1, 33], [1, 2, 3])
    assert torch.equal(here, there)
    assert not torch.equal(here, filled([5, 9, 2], [1, 2, 4]))
    parts = here.reshape(4 * 3, -1)  # of each layer, of keys and values, of each page
    assert len(torch.unique(parts, dim=0)) == len(parts)
    assert abs(here.std() - 1) < 0.05 and abs(here.mean()) < 0.05
