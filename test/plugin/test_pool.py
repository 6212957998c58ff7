"""K, V, digests and hints in SGLang's KV transfer, and what a retracted request keeps."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.common import conn

from page_weights import digest_kinds, identity, rule_of
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.numa import CpuPlan
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.hints import HINT_PAGES
from sglang_scout.engine.memory import ServerSize
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.plugin import fixes, pool
from sglang_scout.plugin import prefill as hooks
from sglang_scout.plugin.ranks import RankCpus
from sglang_scout.policy import Context, make_policy

SIZE = 32
SHAPE = ModelShape(3, 4, 2, 64, SIZE, torch.float32, 0.125)


def lists():
    """Buffer lists of a stock pool: K of three layers, then V."""
    return [10, 11, 12, 20, 21, 22], [1] * 6, [100] * 6


def target_of(digests=None):
    """Buffers of a decode server with these digests."""
    stock = [50, 51, 52, 60, 61, 62]
    return stock if digests is None else pool.with_digests((stock, [1] * 6, [0] * 6), digests)[0]


def transfers(source, target, items):
    """(source, target, item bytes) as SGLang pairs them."""
    manager = SimpleNamespace(kv_args=SimpleNamespace(prefill_start_layer=0))
    mapped = conn.CommonKVManager.get_mha_kv_ptrs_with_pp(manager, source, target)
    src_k, src_v, dst_k, dst_v, layers = mapped
    return [
        *((src_k[i], dst_k[i], items[i]) for i in range(layers)),
        *((src_v[i], dst_v[i], items[layers + i]) for i in range(layers)),
    ]


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
        prefill_data_indices, dst_data_indices = indices.values()
        assert list(dst_data_indices) == [10 * page for page in prefill_data_indices]
        found = transfers(src_data_ptrs, dst_data_ptrs, item_lens)
        calls[tuple(prefill_data_indices)] = found
        return 0

    pages = np.array(pages)
    buffers = dict(src_data_ptrs=source_lists[0], dst_data_ptrs=target, item_lens=source_lists[2])
    indices = dict(prefill_data_indices=pages, dst_data_indices=10 * pages)
    of_session = dict(mooncake_session_id="session", **buffers, **indices)
    status = hooks.around_send_kvcache(send, manager, **of_session)
    if status:
        assert status == -1 and not calls
        return None
    assert set(calls) <= {tuple(pages), tuple(pages[-1:])}
    return [*calls[tuple(pages)], *([calls[tuple(pages[-1:])]] if len(calls) > 1 else [])]


ONLY_K_AND_V = [(here + i, here + 40 + i, 100) for here in (10, 20) for i in range(3)]


def digest_pool(shape, pages, kind):
    model = identity(shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    return DigestPool(shape, pages, "cpu", rule_of(kind, model))


@pytest.mark.parametrize("kind", digest_kinds())
def test_digests_land_in_digests_and_kv_in_kv(kind):
    """With one server that lacks the flag, or ``prefill_digests``, only K and V are sent."""
    here, there = digest_pool(SHAPE, 4, kind), digest_pool(SHAPE, 9, kind)
    source, target = pool.with_digests(lists(), here), target_of(there)
    found = sent(source, target)
    assert set(ONLY_K_AND_V) < set(found)
    assert {(x, y, n) for x, y, n in found if (x, y, n) not in ONLY_K_AND_V} == {
        (mine[layer].data_ptr(), theirs[layer].data_ptr(), mine[layer, 0].nbytes)
        for mine, theirs in zip(here.parts, there.parts, strict=True)
        for layer in range(3)
    }
    assert len(found) == 12
    assert sent(source, target_of()) == sent(lists(), target) == ONLY_K_AND_V
    stock = lists()
    assert transfers(stock[0], target, stock[2]) == ONLY_K_AND_V


class Engine:
    """Records what SGLang's transfer would write, as (source, target, bytes)."""

    def __init__(self):
        self.written = []

    def batch_transfer_sync(self, session, sources, targets, lengths):
        self.written += zip(sources, targets, lengths, strict=True)
        return 0


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
        here = pool.with_digests(here, digest_pool(SHAPE, 4, digests_here))
    there = targets, [1 << 20] * 6, [item // 2] * 6
    if digests_there:
        half = dataclasses.replace(SHAPE, num_kv_heads=1)
        there = pool.with_digests(there, digest_pool(half, 9, digests_there))
    kv_args = SimpleNamespace(
        engine_rank=0,
        kv_item_lens=here[2],
        page_size=SIZE,
        kv_head_num=2,
        total_kv_head_num=2,
        kv_data_ptrs=here[0],
        prefill_start_layer=0,
        kv_layer_ids=None,
    )
    manager = SimpleNamespace(kv_args=kv_args, attn_tp_size=1, engine=Engine())
    if wait := getattr(mooncake.MooncakeKVManager, "_await_transfer_futures", None):
        manager.enable_deferred_decode_kv_release = False
        manager._await_transfer_futures = lambda futures: wait(manager, futures)
    manager.get_mha_kv_ptrs_with_pp = lambda source, target: (
        conn.CommonKVManager.get_mha_kv_ptrs_with_pp(manager, source, target)
    )
    for rank in (0, 1):
        manager.engine.written.clear()
        with ThreadPoolExecutor(1) as executor:
            original = mooncake.MooncakeKVManager.send_kvcache_slice
            pages, pages_there = np.array([2], np.int32), np.array([5], np.int32)
            more = pages_there, rank, 2, item // 2, executor
            hooks.around_send_kvcache_slice(original, manager, "session", pages, there[0], *more)
        own = 2 * item + rank * token
        expected = {
            (sources[i] + own + t * 2 * token, targets[i] + 5 * item // 2 + t * token, token)
            for i in range(2 * layers)
            for t in range(SIZE)
        }
        assert set(manager.engine.written) == expected
        assert len(manager.engine.written) == len(expected)
    assert manager.kv_args is kv_args and kv_args.kv_data_ptrs == here[0]


def host_pool(dtype):
    tokens = 40 * SIZE
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    config = OffloadConfig("scout", digest="minmax", page_checksums=True)
    size = ServerSize(
        config,
        make_policy(Context(config, shape.num_layers, 1)),
        shape,
        max_batch=2,
        context_tokens=4 * SIZE,
        node_cpus=[1],
    )
    sglang = dict(page_size=SIZE, dtype=dtype, head_num=2, head_dim=64, layer_num=3, device="cpu")
    plan, cpus = size.plan(tokens // SIZE + 1), RankCpus(CpuPlan([0], [], [], ""), {})
    own = dict(server_size=size, plan=plan, cpus=cpus)
    made = pool.HostKVPool(tokens, enable_memory_saver=False, **sglang, **own)
    for plane in (*made.k_buffer, *made.v_buffer):
        plane.copy_(torch.randn(plane.shape))
    return made


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.bfloat16, 1), (torch.bfloat16, SIZE), (torch.float32, 5 * SIZE + 7)],
)
def test_a_retracted_request_gets_its_k_and_v_back_elsewhere(dtype, length):
    """In whole pages, which are copied many times faster than tokens, and nothing else is written."""
    made = host_pool(dtype)
    old, new = [7, 8, 9, 3, 20, 21], [30, 4, 5, 6, 31, 2]
    count = -(-length // SIZE)
    old, new = old[:count], new[:count]

    def locations(pages):
        return (torch.tensor(pages)[:, None] * SIZE + torch.arange(SIZE)).flatten()[:length].int()

    planes = (*made.k_buffer, *made.v_buffer)
    expected = [plane[locations(old)].clone() for plane in planes]
    checksums = made.host_pages.checksums
    checksums.seal(np.array(old[: length // SIZE]))
    kept = made.get_cpu_copy(locations(old))
    assert (
        kept[0].nbytes == 2 * 3 * count * SIZE * 2 * 64 * dtype.itemsize == made.copy_bytes(length)
    )
    for plane in planes:
        plane.copy_(torch.randn(plane.shape))  # reused by other requests
    before = [plane.clone() for plane in planes]
    made.load_cpu_copy(kept, locations(new))
    others = torch.from_numpy(np.setdiff1d(np.arange(41), new))
    for plane, wanted, was in zip(planes, expected, before, strict=True):
        assert torch.equal(plane[locations(new)], wanted)
        assert torch.equal(plane.view(41, -1)[others], was.view(41, -1)[others])
    is_sealed = (checksums.words != 0).all(axis=0)
    assert (
        is_sealed[new].tolist()
        == is_sealed[old].tolist()
        == [i < length // SIZE for i in range(count)]
    )
    checksums.check(np.zeros(count), np.array(new))
    assert not checksums.failures, "they are of the K and V that came back"
    with pytest.raises(ValueError, match=f"{count} pages were saved, cannot restore {count + 1}"):
        made.load_cpu_copy(kept, torch.arange(length + SIZE))


def test_other_layers_fail_the_session_and_not_the_thread(caplog):
    """Through both senders, the second for another --tp-size; an exception would end SGLang's transfer thread."""
    source = pool.with_digests(lists(), DigestPool(SHAPE, 4, "cpu", rule_of("minmax")))
    assert sent(source, [50, 51, 60, 61]) is None
    manager = SimpleNamespace(
        kv_args=SimpleNamespace(kv_item_lens=source[2], kv_data_ptrs=source[0])
    )
    assert hooks.around_send_kvcache_slice(pytest.fail, manager, "session", [], [50, 60]) == -1
    for there in (4, 2):
        assert caplog.text.count(f"12 KV buffers and the decode server {there},") == 1


def test_kv_of_other_bytes_is_not_sent(caplog):
    source = pool.with_digests(lists(), DigestPool(SHAPE, 4, "cpu", rule_of("minmax")))
    assert sent(source, target_of(), item_bytes=200) is None
    assert "--kv-cache-dtype fp8_e4m3, --dtype auto: K of a page takes 100 bytes" in caplog.text
    assert "here and 200 on the decode" in caplog.text


@pytest.mark.parametrize(("layer", "half"), [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("kind", digest_kinds())
def test_a_digest_lacks_whatever_layer_or_half_did_not_arrive(kind, layer, half):
    k = [torch.randn(5 * SIZE, 2, 64) for _ in range(3)]
    host = HostPages(SHAPE, k, k)
    there, here = (digest_pool(SHAPE, 5, kind) for _ in range(2))
    pages = np.array([1, 2])
    assert list(here.accept(pages)) == [1, 2]
    there.build(pages, host)
    for part, (mine, theirs) in enumerate(zip(here.parts, there.parts, strict=True)):
        mine[:, 2] = theirs[:, 2]
        for i in range(3):
            if (i, part) != (layer, half):
                mine[i, 1] = theirs[i, 1]
    assert list(here.accept(pages)) == [1] and here.valid.tolist() == [0, 0, 1, 0, 0]
    here.unset(pages)
    assert list(here.accept(pages)) == [1, 2] and not here.valid.any()


@pytest.fixture
def transfer_engine(monkeypatch):
    """SGLang's, on a real one that transfers nothing."""
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    module = pytest.importorskip(
        "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
    )
    mooncake = pytest.importorskip("mooncake.engine")
    engine = object.__new__(module.MooncakeTransferEngine)
    engine.engine = mooncake.TransferEngine()
    assert engine.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def test_memory_that_the_transfer_engine_does_not_take_ends_the_server(transfer_engine):
    original = type(transfer_engine).batch_register
    buffers = [torch.zeros(1 << 16) for _ in range(4)]
    pointers = [b.data_ptr() for b in buffers]
    lengths = [b.nbytes for b in buffers]
    assert fixes.around_batch_register(original, transfer_engine, pointers, lengths) == 0
    with pytest.raises(RuntimeError) as caught:  # they overlap with themselves
        fixes.around_batch_register(original, transfer_engine, pointers, lengths)
    parts = "4 buffers,0.00 GiB,limit on locked memory is,nvidia_peermem,--kv-offload-host-gb,mooncake_tcp"
    assert all(part in str(caught.value) for part in parts.split(","))
    transfer_engine.batch_deregister(pointers)


@pytest.mark.parametrize("kind_there", ["minmax", "rotated-2"])
@pytest.mark.parametrize("hints_there, chunk_is_last", [(True, True), (True, False), (False, True)])
def test_a_hint_is_sent_with_the_last_chunk_if_both_have_them(
    kind_there, hints_there, chunk_is_last
):
    here = DigestPool(SHAPE, 4, "cpu", rule_of("minmax"), hints=True)
    if chunk_is_last:
        here.hints.put(3, np.zeros((3, HINT_PAGES), np.int32))
    there = DigestPool(SHAPE, 90, "cpu", rule_of(kind_there), hints=hints_there)
    target = target_of(there)
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
    digests = DigestPool(SHAPE, 9, "cpu", rule_of("minmax"), hints=True)
    request = SimpleNamespace(
        rid="r",
        disagg_kv_sender=SimpleNamespace(),
        start_send_idx=0,
        origin_input_ids=[0] * (7 * SIZE + 1),
    )
    monkeypatch.setattr(hooks.adapter, "row_of", lambda req: 0)
    monkeypatch.setattr(hooks.adapter, "extend_end", lambda req: 7 * SIZE + 1)
    monkeypatch.setattr(hooks, "DigestKVPool", SimpleNamespace)
    kv = SimpleNamespace(
        page_size=SIZE,
        device="cpu",
        digests=digests,
        rule=rule_of("minmax"),
        host_pages=HostPages(SHAPE, keys, keys),
        shape=SHAPE,
    )
    order = torch.tensor([3, 1, 8, 2, 7, 5, 4, 6])
    locations = (order[:, None] * SIZE + torch.arange(SIZE)).flatten()
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv),
        req_to_token_pool=SimpleNamespace(req_to_token=locations[None]),
    )
    heard = []
    backend = SimpleNamespace(forward_extend=lambda *args: heard.append(args))
    kv.last_queries = hooks.LastQueries(backend)
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
