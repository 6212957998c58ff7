"""The hooks of a prefill server: it computes digests and hints, and sends them with the KV."""

from __future__ import annotations

import copy
import functools
import logging
from collections import deque
from typing import Any

import numpy as np
import torch

from sglang_scout.engine.device import upload
from sglang_scout.engine.digest_pool import choose_hint
from sglang_scout.engine.hints import has_hint, hint_bytes
from sglang_scout.engine.memory import bytes_beside_digests
from sglang_scout.plugin import pool as pools
from sglang_scout.plugin import status
from sglang_scout.plugin.allocator import DigestListener
from sglang_scout.plugin.hooks import hook
from sglang_scout.plugin.launch import parse
from sglang_scout.plugin.model import model_shape, rank_policy
from sglang_scout.plugin.pool import DigestKVPool, build_pools, pools_target
from sglang_scout.plugin.release import adapter

logger = logging.getLogger(__name__)

KEPT_BATCHES = 3  # more than one, as SGLang sends a batch's KV while the next one runs


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


_warn_once = functools.cache(logger.warning)


@hook(pools_target("_profile_available_bytes"), "around")
def around_profile_available_bytes(original, runner, *args, **kwargs) -> int:
    """Reserve room for the digests in the memory that SGLang would give to KV."""
    available, config = original(runner, *args, **kwargs), parse(runner.server_args)
    if not config.prefill_digests:
        return available
    shape = model_shape(runner)
    return bytes_beside_digests(shape, rank_policy(config, shape).rule, available)


@hook(pools_target("_init_pools"), "around")
def around_init_pools(original, runner, **given):
    """Allocate a digest pool in addition to the KV pool."""
    config, build = parse(runner.server_args), functools.partial(original, runner, **given)
    if not config.prefill_digests:
        return build_pools(build, runner)[0]
    result, pool, allocator = build_pools(build, runner, DigestKVPool)
    shape = model_shape(runner)
    hints = bool(hint_bytes(config, shape.num_layers))
    pool.add_digests(shape, rank_policy(config, shape).rule, hints)
    allocator.listener = DigestListener(pool.digests)
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


def _same_layers(here: int, there: int, layers: int) -> bool:
    """Whether ``there`` is a count of buffers of as many layers, with or without digests and hints. An exception would
    end SGLang's transfers to all decode servers, a hook's result of -1 only those to this one."""
    same = there in (2 * layers, 4 * layers, 6 * layers)
    if not same:
        logger.error(
            "--kv-offload: this server has %d KV buffers and the decode server %d, so no KV is sent: the two serve "
            "different models, or only one uses pipeline parallelism; give both the same --model-path and no --pp-size",
            here,
            there,
        )
    return same


@hook("disaggregation.mooncake.conn.MooncakeKVManager._send_kvcache_generic", "around")
def around_send_kvcache(original, manager, *args, **kwargs) -> int:
    """Omit the digests for a decode server without the flag, or with digests of another size; of hints, send only the
    prompt's.

    SGLang would pair V with digests. A hint is in the row of its prompt's last page. SGLang's decode server does not
    refuse KV of another --dtype, nor of a server that was restarted with another --kv-cache-dtype.
    """
    source, target, items = (kwargs[x] for x in ("src_data_ptrs", "dst_data_ptrs", "item_lens"))
    if kwargs.get("state_type") is not None or source != manager.kv_args.kv_data_ptrs:
        return original(manager, *args, **kwargs)
    layers, own = pools.num_layers(items), items[0]
    there = manager.decode_kv_args_table[kwargs["mooncake_session_id"]].dst_kv_item_len
    if own != there:
        server = manager.server_args
        logger.error(
            "--kv-cache-dtype %s, --dtype %s: K of a page takes %d bytes here and %d on the decode server, so no KV "
            "is sent; give both servers the same flags",
            server.kv_cache_dtype,
            server.dtype,
            own,
            there,
        )
        return -1
    if not _same_layers(len(source), len(target), layers):
        return -1
    common = min(len(source), len(target)) // (2 * layers)
    if common > 1 and not pools.same_items(items, target, layers, 1):
        _warn_once(
            "--kv-offload: the decode server has another `digest` in --kv-offload-config, so it gets no digests and "
            "computes its own; set the same on both servers"
        )
        common = 1

    def send(first: int, count: int, **others: Any) -> int:
        for name in ("src_data_ptrs", "item_lens", "dst_data_ptrs"):
            others[name] = pools.of_groups(kwargs[name], layers, first, count)
        return original(manager, *args, **kwargs | others)

    if status := send(0, min(common, 2)):
        return status
    if common < 3 or not pools.same_items(items, target, layers, 2):
        return 0
    last = {name: kwargs[name][-1:] for name in ("prefill_data_indices", "dst_data_indices")}
    row = (pools.of_groups(values, layers, 2)[0] for values in (source, items))
    # No hint before the end of a prompt.
    return send(2, 1, **last) if has_hint(*row, int(last["prefill_data_indices"][0])) else 0


@hook("disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache_slice", "around")
def around_send_kvcache_slice(
    original, manager, session: str, pages, target: list[int], *args, **kwargs
) -> int:
    """Omit the digests for a decode server with another `--tp-size`.

    It computes them. SGLang slices every buffer of the list by heads as if it held K or V.
    """
    infos, layers = manager.kv_args, pools.num_layers(manager.kv_args.kv_item_lens)
    if not _same_layers(len(infos.kv_data_ptrs), len(target), layers):
        return -1
    if len(set(infos.kv_item_lens)) > 1:
        manager, infos = copy.copy(manager), copy.copy(infos)
        infos.kv_data_ptrs = pools.of_groups(infos.kv_data_ptrs, layers, 0)
        manager.kv_args = infos
        target = pools.of_groups(target, layers, 0)
    return original(manager, session, pages, target, *args, **kwargs)


@hook("managers.scheduler.Scheduler.get_internal_state", "after")
def after_get_internal_state(result, scheduler, *args, **kwargs):
    """Add the state to `/server_info`."""
    result.internal_state["kv_offload"] = status.prefill_state(scheduler)
    return result
