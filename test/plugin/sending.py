"""What SGLang's KV transfer would send, given both servers' buffer lists."""

from types import SimpleNamespace

import numpy as np
from sglang.srt.disaggregation.common import conn

from sglang_scout.plugin import prefill as hooks


def lists():
    """Buffer lists of a stock pool: K of three layers, then V."""
    return [10, 11, 12, 20, 21, 22], [1] * 6, [100] * 6


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
    status = hooks.around_send_kvcache(
        send,
        manager,
        mooncake_session_id="session",
        src_data_ptrs=source_lists[0],
        dst_data_ptrs=target,
        item_lens=source_lists[2],
        prefill_data_indices=pages,
        dst_data_indices=10 * pages,
    )
    if status:
        assert status == -1 and not calls
        return None
    assert set(calls) <= {tuple(pages), tuple(pages[-1:])}
    return [*calls[tuple(pages)], *([calls[tuple(pages[-1:])]] if len(calls) > 1 else [])]


ONLY_K_AND_V = [(here + i, here + 40 + i, 100) for here in (10, 20) for i in range(3)]
