"""A retracted request's KV is copied if there is memory for it; else only that request fails."""

from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_scout.plugin import decode as hooks

COPY = 5000


def request(rid):
    """Valid for every release: in some its row and its copy are in ``kv``."""
    kv = {"req_pool_idx": 0, "mamba_pool_idx": None}
    more = {"retraction_backup": None, "holds_mamba": False}
    made = SimpleNamespace(rid=rid, seqlen=100, **kv, kv=SimpleNamespace(**kv, **more))
    made._mamba_pool_needing_backup = lambda *_: None
    return made


@pytest.mark.parametrize(("available", "kept"), [(2 * COPY, True), (2 * COPY - 1, False)])
def test_a_copy_that_does_not_fit_fails_its_request(monkeypatch, available, kept):
    """Of two ranks, the other of which has more memory."""
    ranks = SimpleNamespace(size=2, least=lambda value: min(value, 1 << 40))
    monkeypatch.setattr(hooks, "AttentionRanks", lambda: ranks)
    monkeypatch.setattr(hooks, "available_bytes", lambda: available + hooks.LEFT_BESIDE_COPIES)
    pool = SimpleNamespace(copy_bytes={99: COPY}.get)
    allocator = SimpleNamespace(
        get_kvcache=lambda: pool, get_cpu_copy=lambda tokens, **_: copied.append(tokens) or tokens
    )
    req, copied = request("r"), []
    tables = SimpleNamespace(req_to_token=np.arange(200)[None])
    hooks.around_offload_kv_cache(Req.offload_kv_cache, req, tables, allocator)
    assert [len(tokens) for tokens in copied] == [99] * kept

    # A pause does not mark its requests as retracted, and would have their KV sent again.
    queued, told = [], []
    channel = SimpleNamespace(send_output=lambda output, _: told.append(output))
    scheduler = SimpleNamespace(ipc_channels=SimpleNamespace(send_to_tokenizer=channel))
    for one in (req, request("new")):
        hooks.around_add_request_to_queue(
            lambda _, req, is_retracted=False: queued.append((req.rid, is_retracted)),
            scheduler,
            one,
        )
    assert queued == ([("r", True)] if kept else []) + [("new", False)]
    assert [(t.rid, t.finished_reason["status_code"]) for t in told] == (
        [] if kept else [("r", 503)]
    )
