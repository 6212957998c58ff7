"""What a prefill server adds: digests and hints, computed while K is on the device and sent with the KV; and noise in
place of such a server."""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_scout.engine.device import upload
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.requests import PageHints, choose_hint, hint_bytes
from sglang_scout.engine.stores import HostPages, as_words
from sglang_scout.plugin import status
from sglang_scout.plugin.hooks import adapter, hook
from sglang_scout.plugin.launch import parse
from sglang_scout.plugin.model import model_shape, rank_policy
from sglang_scout.plugin.pools import DigestKVPool, build_pools, pools_target
from sglang_scout.worker.host_memory import MAX_THREADS

KEPT_BATCHES = 3  # more than one, as SGLang sends a batch's KV while the next one runs
NOISE_PAGES = 1021  # a prime: no period of a prompt's pages aligns with that of the noise
MASK_ELEMENTS = 1 << 24
"""Maximum mask size, rows x KV tokens; rows are processed in chunks."""


class LastQueries:
    """The real queries of each prompt's last token, in the newest batches of SGLang's attention ``backend``."""

    def __init__(self, backend: Any) -> None:
        # Of each batch the requests, the row of each one's last token, and the queries [B, HQ, D] of each layer.
        self._batches: deque[tuple[list[str], torch.Tensor, list[torch.Tensor]]]
        self._batches = deque(maxlen=KEPT_BATCHES)
        original = backend.forward_extend

        def forward_extend(q, k, v, layer, forward_batch, *args, **kwargs):
            self._note(q, layer, forward_batch)
            return original(q, k, v, layer, forward_batch, *args, **kwargs)

        backend.forward_extend = forward_extend

    def _note(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """``q`` ``[T, HQ * D]`` of all tokens of a batch, after RoPE."""
        if not forward_batch.rids:
            return  # SGLang warms up or captures
        if layer.layer_id == 0:
            last = np.cumsum(forward_batch.extend_seq_lens_cpu) - 1
            self._batches.append((forward_batch.rids, upload(last, q.device), []))
        _, rows, layers = self._batches[-1]
        layers.append(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).index_select(0, rows))

    def of(self, rid: str) -> torch.Tensor | None:
        """``[L, HQ, D]`` fp32 queries of the last token of request ``rid`` in its newest batch."""
        for rids, _, layers in reversed(self._batches):
            if rid in rids:
                row = rids.index(rid)
                return torch.stack([queries[row] for queries in layers]).float()
        return None


@hook(pools_target("_profile_available_bytes"), "around")
def around_profile_available_bytes(original, runner, *args, **kwargs) -> int:
    """Reserve room for the digests in the memory that SGLang would give to KV."""
    available, config = original(runner, *args, **kwargs), parse(runner.server_args)
    if not config.prefill_digests:
        return available
    shape = model_shape(runner)
    page_bytes = 2 * shape.page_bytes * shape.num_layers
    digest_bytes = rank_policy(config, shape).rule.digest_bytes(shape)
    return available * page_bytes // (page_bytes + digest_bytes)


@hook(pools_target("_init_pools"), "around")
def around_init_pools(original, runner, **given):
    """Allocate a digest pool in addition to the KV pool."""
    config, build = parse(runner.server_args), functools.partial(original, runner, **given)
    if not config.prefill_digests:
        return build_pools(build, runner)[0]
    result, pool, allocator = build_pools(build, runner, DigestKVPool)
    pool.shape = shape = model_shape(runner)
    rule = rank_policy(config, shape).rule
    pool.host_pages = host = HostPages(shape, pool.k_buffer, pool.v_buffer)
    hints = PageHints(shape, host.num_pages) if hint_bytes(config, shape.num_layers) else None
    pool.digests = DigestPool(shape, host.num_pages, pool.device, rule, hints)
    pool.rule = replace(rule, weights=None)
    # Only digests depend on the pages, which change owner in stream order.
    allocator.listener = SimpleNamespace(
        allocate_pages=pool.digests.unset,
        free_pages=pool.digests.invalidate,
        may_be_written=lambda pages: False,
        clear=lambda: pool.digests.valid.fill(False),
    )
    return result


@hook("model_executor.model_runner.ModelRunner.init_attention_backends", "after")
def after_init_attention_backends(_, runner) -> None:
    """Record the real queries of each prompt's last token."""
    pool = runner.token_to_kv_pool
    if isinstance(pool, DigestKVPool) and pool.digests.hints is not None:
        pool.last_queries = LastQueries(runner.attn_backend)


@hook("disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk", "before")
def before_send_kv_chunk(
    scheduler, req, last_chunk: bool = False, end_idx: int | None = None
) -> None:
    """Compute the digests of the pages about to be sent, and the hint: the best pages for the last token.

    The digests are of the chunk's full pages, whose K is still on the device. The hint comes with the last chunk.
    """
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if torch.device(pool.device).type == "cpu":
        # Of 0.5.23: they are page-locked, by CUDA.
        req.disagg_kv_sender.supports_host_tensor_indices = False
    if not isinstance(pool, DigestKVPool):
        return
    size = pool.page_size
    end = min(adapter.extend_end(req), len(req.origin_input_ids)) if end_idx is None else end_idx
    # The decode server may already have the first pages.
    first = 0 if last_chunk else req.start_send_idx // size * size
    locations = scheduler.req_to_token_pool.req_to_token[adapter.row_of(req), first:end:size]
    pages = (locations // size).cpu().numpy().astype("int64")
    full = pages[: end // size - first // size]
    pool.digests.build(full[~pool.digests.valid[full]], pool.host_pages)
    if not last_chunk or pool.digests.hints is None:
        return
    queries = pool.last_queries.of(req.rid)
    if queries is None:
        return
    hint = choose_hint(pool.digests, queries, full, pool.rule, pool.shape.scale)
    if hint is not None:
        pool.digests.hints.put(pages[-1], hint)


@hook("managers.scheduler.Scheduler.get_internal_state", "after")
def after_get_internal_state(result, scheduler, *args, **kwargs):
    """Add the state to `/server_info`."""
    result.internal_state["kv_offload"] = status.prefill_state(scheduler)
    return result


@hook(
    "layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
    "around",
)
def around_extend(
    original, self, query, output, k_cache, v_cache, table, rows, *lengths, **options
):
    """On a CPU: skip attention for tokens with cached KV, which SGLang computes and discards.

    Sequences with more new tokens than cached ones use the original, which is then faster. All models that are
    supported have causal attention without windows and no encoder.

    Args:
        query, output: [T, HQ, D]; the latter is filled and returned.
        k_cache, v_cache: [slots, H, D].
        lengths: total, cached and new tokens of each sequence; more, of encoders, in some releases.
    """
    begin, scale, is_gqa = 0, options["scaling"], options["enable_gqa"]
    for i, (total, _, count) in enumerate(zip(*(x.tolist() for x in lengths[:3]), strict=True)):
        q, out = query[begin : begin + count], output[begin : begin + count]
        begin += count
        if 2 * count > total:
            of_one = [x[i : i + 1] for x in (rows, *lengths[:3])]
            original(self, q, out, k_cache, v_cache, table, *of_one, **options)
            continue
        slots = table[rows[i], :total]
        k, v = (cache[slots].movedim(1, 0)[None].to(q.dtype) for cache in (k_cache, v_cache))
        columns = torch.arange(total, device=q.device)
        for part in columns[:count].split(max(1, MASK_ELEMENTS // total)):
            mask = columns <= (part + total - count)[:, None]
            of_part = q[part].movedim(1, 0)[None]
            found = scaled_dot_product_attention(
                of_part, k, v, mask, scale=scale, enable_gqa=is_gqa
            )
            out[part] = found[0].movedim(0, 1)
    return output


class DummyKV:
    """Random K and V of requests without a prefill server, for benchmarks and tests: SGLang's fake transfer leaves a
    request's pages in ``host`` as their previous owner did."""

    def __init__(self, host: HostPages) -> None:
        self._planes = [as_words(plane) for plane in (*host.k, *host.v)]
        size, seeded = (NOISE_PAGES, *host.k[0].shape[1:]), torch.Generator().manual_seed(0)
        self._noise = as_words(torch.randn(size, generator=seeded).to(host.k[0].dtype))

    def fill(self, pages: npt.NDArray[np.int64], prompt: Sequence[int]) -> None:
        """K and V of all layers are standard normal in ``pages`` ``[N]`` of the tokens ``prompt``, the last one too,
        and depend only on the prompt and the position."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a step of the pages' previous owner may still append to them
        seed, where = zlib.crc32(np.asarray(prompt, np.int64).tobytes()), pages.tolist()

        def fill_plane(first: int, plane: Any) -> None:
            for position, page in enumerate(where):
                plane[page] = self._noise[(first + position * 7) % NOISE_PAGES]

        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as pool:
            # numpy copies a page without the GIL
            list(pool.map(fill_plane, itertools.count(seed), self._planes))
