"""K, V, digests and hints in SGLang's KV transfer; lost servers: test_lost_servers.py."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.common import conn

from page_weights import digest_kinds, digest_pool, rule_of
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.requests import hints_of
from sglang_scout.engine.stores import ModelShape
from sglang_scout.plugin import prefill, ranks
from sglang_scout.plugin.pools import with_digests

SIZE = 32
SHAPE = ModelShape(3, 4, 2, 64, SIZE, torch.float32, 0.125)


def lists():
    """Buffer lists of a stock pool: K of three layers, then V."""
    return [10, 11, 12, 20, 21, 22], [1] * 6, [100] * 6


def target_of(digests=None):
    """Buffers of a decode server with these digests."""
    infos = [50, 51, 52, 60, 61, 62], [1] * 6, [0] * 6
    return infos[0] if digests is None else with_digests(infos, digests)[0]


def paired(source, target, items):
    """(source, target, item bytes) as SGLang pairs them."""
    manager = SimpleNamespace(kv_args=SimpleNamespace(prefill_start_layer=0))
    *mapped, layers = conn.CommonKVManager.get_mha_kv_ptrs_with_pp(manager, source, target)
    src_k, src_v, dst_k, dst_v = (of_layers[:layers] for of_layers in mapped)
    return list(zip(src_k + src_v, dst_k + dst_v, items, strict=True))


def sent(source_lists, target, pages=(1, 2, 3), item_bytes=100):
    """What a prefill server with the flag sends to a decode server with these buffers, K of a page in ``item_bytes``.

    None: a failure is reported to SGLang. First for all of ``pages``, then, as separate lists, for the last one only.
    """
    manager = SimpleNamespace(
        kv_args=SimpleNamespace(kv_data_ptrs=source_lists[0]),
        decode_kv_args_table={"session": SimpleNamespace(dst_kv_item_len=item_bytes)},
        server_args=SimpleNamespace(kv_cache_dtype="fp8_e4m3", dtype="auto"),
    )
    calls = {}

    def send(_, src_data_ptrs, dst_data_ptrs, item_lens, mooncake_session_id, **indices):
        here, there = indices.values()
        assert list(there) == [10 * page for page in here]
        calls[tuple(here)] = paired(src_data_ptrs, dst_data_ptrs, item_lens)
        return 0

    pages = np.array(pages)
    buffers = dict(src_data_ptrs=source_lists[0], dst_data_ptrs=target, item_lens=source_lists[2])
    indices = dict(prefill_data_indices=pages, dst_data_indices=10 * pages)
    of_session = dict(mooncake_session_id="session", **buffers, **indices)
    status = prefill.around_send_kvcache(send, manager, **of_session)
    if status:
        assert status == -1 and not calls
        return None
    assert set(calls) <= {tuple(pages), tuple(pages[-1:])}
    return [*calls[tuple(pages)], *([calls[tuple(pages[-1:])]] if len(calls) > 1 else [])]


ONLY_K_AND_V = [(here + i, here + 40 + i, 100) for here in (10, 20) for i in range(3)]


@pytest.mark.parametrize("kind", digest_kinds())
def test_digests_land_in_digests_and_kv_in_kv(kind):
    """With one server that lacks the flag, or ``prefill_digests``, only K and V are sent."""
    here, there = digest_pool(SHAPE, 4, kind), digest_pool(SHAPE, 9, kind)
    source, target = with_digests(lists(), here), target_of(there)
    found = sent(source, target)
    assert set(ONLY_K_AND_V) < set(found)
    assert {(x, y, n) for x, y, n in found if (x, y, n) not in ONLY_K_AND_V} == {
        (mine[layer].data_ptr(), theirs[layer].data_ptr(), mine[layer, 0].nbytes)
        for mine, theirs in zip(here.parts, there.parts, strict=True)
        for layer in range(3)
    }
    assert len(found) == 12
    assert sent(source, target_of()) == sent(lists(), target) == ONLY_K_AND_V
    assert paired(lists()[0], target, lists()[2]) == ONLY_K_AND_V, "from a server without the flag"


@pytest.mark.parametrize("digests_here", [*digest_kinds(), None])
@pytest.mark.parametrize("digests_there", ["minmax", None])
def test_a_decode_server_of_another_tp_size_gets_the_k_and_v_of_its_heads(
    digests_here, digests_there
):
    """One prefill rank with two KV heads, two decode ranks with one each, through SGLang's own sender."""
    mooncake = pytest.importorskip("sglang.srt.disaggregation.mooncake.conn", reason="mooncake")
    layers, token = 3, 64 * 4  # bytes of a head
    item = SIZE * 2 * token
    # Far apart, so that an address identifies its buffer.
    sources, targets = ([base + i * (1 << 20) for i in range(6)] for base in (1 << 30, 1 << 40))
    here = sources, [1 << 20] * 6, [item] * 6
    if digests_here:
        here = with_digests(here, digest_pool(SHAPE, 4, digests_here))
    there = targets, [1 << 20] * 6, [item // 2] * 6
    if digests_there:
        half = dataclasses.replace(SHAPE, num_kv_heads=1)
        there = with_digests(there, digest_pool(half, 9, digests_there))
    of_rank = {"engine_rank": 0, "prefill_start_layer": 0, "page_size": SIZE, "kv_layer_ids": None}
    heads = {"kv_head_num": 2, "total_kv_head_num": 2}
    buffers = {"kv_data_ptrs": here[0], "kv_item_lens": here[2]}
    kv_args = SimpleNamespace(**of_rank, **heads, **buffers)
    written = []  # (source, target, bytes)
    write = lambda session, *lists: written.extend(zip(*lists, strict=True)) or 0  # noqa: E731
    engine = SimpleNamespace(batch_transfer_sync=write)
    manager = SimpleNamespace(kv_args=kv_args, attn_tp_size=1, engine=engine)
    if wait := getattr(mooncake.MooncakeKVManager, "_await_transfer_futures", None):
        manager.enable_deferred_decode_kv_release = False
        manager._await_transfer_futures = lambda futures: wait(manager, futures)
    manager.get_mha_kv_ptrs_with_pp = lambda source, target: (
        conn.CommonKVManager.get_mha_kv_ptrs_with_pp(manager, source, target)
    )
    for rank in (0, 1):
        written.clear()
        with ThreadPoolExecutor(1) as executor:
            original = mooncake.MooncakeKVManager.send_kvcache_slice
            pages, pages_there = np.array([2], np.int32), np.array([5], np.int32)
            given = manager, "session", pages, there[0], pages_there, rank, 2, item // 2, executor
            prefill.around_send_kvcache_slice(original, *given)
        own = 2 * item + rank * token
        expected = {
            (sources[i] + own + t * 2 * token, targets[i] + 5 * item // 2 + t * token, token)
            for i in range(2 * layers)
            for t in range(SIZE)
        }
        assert sorted(written) == sorted(expected)
    assert manager.kv_args is kv_args and kv_args.kv_data_ptrs == here[0]


def test_kv_of_another_model_or_size_is_not_sent(caplog):
    """Through both senders, the second for another --tp-size; an exception would end SGLang's transfer thread."""
    source = with_digests(lists(), DigestPool(SHAPE, 4, "cpu", rule_of("minmax")))
    assert sent(source, [50, 51, 60, 61]) is None
    kv_args = SimpleNamespace(kv_item_lens=source[2], kv_data_ptrs=source[0])
    manager = SimpleNamespace(kv_args=kv_args)
    assert prefill.around_send_kvcache_slice(pytest.fail, manager, "session", [], [50, 60]) == -1
    for there in (4, 2):
        assert caplog.text.count(f"12 KV buffers and the decode server {there},") == 1
    assert sent(source, target_of(), item_bytes=200) is None
    assert "K of a page takes 100 bytes here and 200 on the decode" in caplog.text


def test_memory_that_the_transfer_engine_does_not_take_ends_the_server(monkeypatch):
    """SGLang's, on a real one that transfers nothing."""
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    folder = "sglang.srt.distributed.device_communicators"
    module = pytest.importorskip(f"{folder}.mooncake_transfer_engine")
    engine = object.__new__(module.MooncakeTransferEngine)
    engine.engine = pytest.importorskip("mooncake.engine").TransferEngine()
    assert engine.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    buffers = [torch.zeros(1 << 16) for _ in range(4)]
    given = engine, [b.data_ptr() for b in buffers], [b.nbytes for b in buffers]
    original = type(engine).batch_register
    assert ranks.around_batch_register(original, *given) == 0
    monkeypatch.setattr(ranks, "lock_limit", lambda: "")
    with pytest.raises(RuntimeError, match="4 buffers of 0.001 GiB .*; set .* mooncake_tcp to"):
        ranks.around_batch_register(original, *given)  # they overlap with themselves
    engine.batch_deregister(given[1])


@pytest.mark.parametrize(
    "kind, kind_there", [("minmax", "minmax"), ("none", "none"), ("minmax", "rotated-2")]
)
@pytest.mark.parametrize("hints_there, chunk_is_last", [(True, True), (True, False), (False, True)])
def test_a_hint_is_sent_with_the_last_chunk_if_both_have_them(
    kind, kind_there, hints_there, chunk_is_last
):
    hints_of_kind = hints_of(rule_of(kind))
    words = hints_of_kind.words(SHAPE)
    here = DigestPool(SHAPE, 4, "cpu", rule_of(kind), hints_of_kind(SHAPE, 4))
    if chunk_is_last:
        here.hints.put(3, np.zeros((3, words - words % 32), np.int32))
    hints = hints_of_kind(SHAPE, 90) if hints_there else None
    there = DigestPool(SHAPE, 90, "cpu", rule_of(kind_there), hints)
    target = target_of(there)
    pairs = sent(with_digests(lists(), here), target)
    if kind_there != kind:
        assert pairs == ONLY_K_AND_V
    elif not (hints_there and chunk_is_last):
        assert len(pairs) == 12
    else:
        *pairs, hints = pairs
        assert len(pairs) == 12 and len(hints) == 6
        assert hints == [
            (mine[i].data_ptr(), theirs[i].data_ptr(), words)  # of 2 bytes, in two parts
            for mine, theirs in zip(here.hints.parts, there.hints.parts, strict=True)
            for i in range(3)
        ]
