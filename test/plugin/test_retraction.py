"""A retracted request's KV is copied where there is memory for it; else that request fails, and nothing else."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang.srt.plugins", reason="needs SGLang")
from sglang.srt.managers.schedule_batch import Req  # noqa: E402

from sglang_scout.plugin import decode_hooks as hooks  # noqa: E402

COPY = 5000


@pytest.mark.parametrize(("available", "kept"), [(2 * COPY, True), (2 * COPY - 1, False)])
def test_a_copy_that_does_not_fit_fails_its_request(monkeypatch, available, kept):
    """Of two ranks, the other of which has more memory."""
    ranks = SimpleNamespace(size=2, least=lambda value: min(value, 1 << 40))
    monkeypatch.setattr(hooks, "AttentionRanks", lambda: ranks)
    monkeypatch.setattr(hooks, "available_bytes", lambda: available + hooks.LEFT_BESIDE_COPIES)
    pool = SimpleNamespace(copy_bytes={99: COPY}.get)
    allocator = SimpleNamespace(
        get_kvcache=lambda: pool, get_cpu_copy=lambda tokens, mamba_indices: tokens
    )
    req = SimpleNamespace(rid="r", seqlen=100, req_pool_idx=0, mamba_pool_idx=None)
    tables = SimpleNamespace(req_to_token=np.arange(200)[None])
    hooks.around_offload_kv_cache(Req.offload_kv_cache, req, tables, allocator)
    assert (req.kv_cache_cpu is not None) == kept and (not kept or len(req.kv_cache_cpu) == 99)

    # A pause does not say that its requests were retracted, and would have their KV sent again.
    queued, told = [], []
    channel = SimpleNamespace(send_output=lambda output, _: told.append(output))
    scheduler = SimpleNamespace(ipc_channels=SimpleNamespace(send_to_tokenizer=channel))
    for one in (req, SimpleNamespace(rid="new")):
        hooks.around_add_request_to_queue(
            lambda _, req, is_retracted=False: queued.append((req.rid, is_retracted)),
            scheduler,
            one,
        )
    assert queued == ([("r", True)] if kept else []) + [("new", False)]
    assert [(t.rid, t.finished_reason["status_code"]) for t in told] == (
        [] if kept else [("r", 503)]
    )
