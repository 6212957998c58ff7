"""The hooks of a prefill server: digests and hints, computed while K is on the device and sent with the KV."""

from __future__ import annotations

import copy
import functools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq
from torch.nn.functional import scaled_dot_product_attention

from sglang_scout.engine.device import upload
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.requests import choose_hint, has_hint, hints_of
from sglang_scout.engine.stores import HostPages
from sglang_scout.plugin.hooks import VERSION, adapter, hook, pools_target
from sglang_scout.plugin.launch import parse
from sglang_scout.plugin.model import model_shape, rank_policy
from sglang_scout.plugin.pools import DigestKVPool, build_pools

logger = logging.getLogger(__name__)

_MOONCAKE = "disaggregation.mooncake.conn.MooncakeKVManager"
KEPT_BATCHES = 3  # more than one, as SGLang sends a batch's KV while the next one runs
MASK_ELEMENTS = 1 << 24
"""Maximum mask size, rows x KV tokens; rows are processed in chunks."""
_warn_once = functools.cache(logger.warning)


class LastQueries:
    """The real queries of each prompt's last token, in the newest batches of SGLang's attention ``backend``."""

    def __init__(self, backend: Any) -> None:
        # Of each batch the requests, the row of each one's last token, and the queries [B, HQ, D] of each layer.
        self._batches: deque[tuple[list[str], torch.Tensor, list[torch.Tensor]]]
        self._batches = deque(maxlen=KEPT_BATCHES)
        backend.forward_extend = functools.partial(self._extend, backend.forward_extend)

    def _extend(self, original, q, k, v, layer, forward_batch, *args, **kwargs):
        """``q`` ``[T, HQ * D]`` of all tokens of a batch, after RoPE."""
        if rids := forward_batch.rids:  # else SGLang warms up or captures
            if layer.layer_id == 0:
                last = np.cumsum(forward_batch.extend_seq_lens_cpu) - 1
                self._batches.append((rids, upload(last, q.device), []))
            _, rows, layers = self._batches[-1]
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            layers.append(heads.index_select(0, rows))
        return original(q, k, v, layer, forward_batch, *args, **kwargs)

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
    kind = hints_of(rule)
    hints = kind and kind(shape, host.num_pages)
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
def before_send_kv_chunk(scheduler, req, last_chunk=False, end_idx=None) -> None:
    """Compute the digests of the pages about to be sent, and the hint: the best pages for the last token."""
    # The digests are of the chunk's full pages, whose K is still on the device. The hint comes with the last chunk.
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
    hints = pool.digests.hints if last_chunk else None
    if hints is not None and (queries := pool.last_queries.of(req.rid)) is not None:
        hint = choose_hint(pool.digests, queries, full, pool.rule, pool.shape.scale)
        if hint is not None:
            hints.put(pages[-1], hint)


def prefill_state(scheduler: Any) -> dict[str, Any]:
    """State of a prefill server: its digests."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    digests = getattr(pool, "digests", None)
    hints = getattr(digests, "hints", None)
    return {
        "policy": scheduler.server_args.kv_offload,
        "sglang": VERSION,
        "page_size": pool.page_size,
        "digests_sent": digests is not None,
        "digests_computed": getattr(digests, "computed", 0),
        "hints_made": getattr(hints, "made", 0),
    }


@hook("managers.scheduler.Scheduler.get_internal_state", "after")
def after_get_internal_state(result, scheduler, *args, **kwargs):
    """Add the state to `/server_info`."""
    result.internal_state["kv_offload"] = prefill_state(scheduler)
    return result


@hook(
    "layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
    "around",
)
def around_extend(
    original, self, query, output, k_cache, v_cache, table, rows, *lengths, **options
):
    """On a CPU: skip attention for tokens with cached KV, which SGLang computes and discards."""
    # query and output, which is filled and returned, are [T, HQ, D], the caches [slots, H, D]; lengths are of each
    # sequence: total, cached and new tokens; more, of encoders, in some releases. Sequences with more new tokens than
    # cached ones use the original, which is then faster. Supported models have causal attention without windows.
    begin, how = 0, {"scale": options["scaling"], "enable_gqa": options["enable_gqa"]}
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
            found = scaled_dot_product_attention(of_part, k, v, mask, **how)
            out[part] = found[0].movedim(0, 1)
    return output


def _num_layers(item_lens: list[int]) -> int:
    return item_lens.count(item_lens[0]) // 2  # those of K and V are equal, all others much smaller


def same_items(items: list[int], target: list[int], layers: int, group: int) -> bool:
    """Whether the buffers of digests and of ``group`` at ``target`` have the item bytes of ``items``: each part of a
    group is one allocation, in which a layer has one item per page of that server."""
    if layers == 1:
        return False
    sizes = [n for g in (1, group) for n in of_groups(items, layers, g)[::layers]]
    starts = [of_groups(target, layers, g) for g in (1, group)]
    lengths = [x[i + 1] - x[i] for x in starts for i in (0, layers)]
    pairs = zip(lengths, sizes, strict=True)
    return all(0 < nbytes * sizes[0] == lengths[0] * item for nbytes, item in pairs)


def of_groups(values: list[int], layers: int, first: int, count: int = 1) -> list[int]:
    """The part of ``count`` groups from ``first`` on, of a list made by :func:`with_digests`."""
    middle, begin, end = len(values) // 2, first * layers, (first + count) * layers
    return values[begin:end] + values[middle + begin : middle + end]


def _same_layers(here: int, there: int, layers: int) -> bool:
    """Whether ``there`` is a count of buffers of as many layers, with or without digests and hints. An exception would
    end SGLang's transfers to all decode servers, a result of -1 only those to this one."""
    same = there in (2 * layers, 4 * layers, 6 * layers)
    if not same:
        logger.error(
            f"--kv-offload: this server has {here} KV buffers and the decode server {there}, so no KV is sent; give "
            "both the same --model-path and no --pp-size"
        )
    return same


@hook(f"{_MOONCAKE}._send_kvcache_generic", "around")
def around_send_kvcache(original, manager, *args, **kwargs) -> int:
    """Omit the digests for a decode server without the flag, or with digests of another size; of hints, send only the
    prompt's."""
    # SGLang would pair V with digests, and takes KV of another dtype. A hint is in the row of its prompt's last page.
    source, target, items = (kwargs[x] for x in ("src_data_ptrs", "dst_data_ptrs", "item_lens"))
    if kwargs.get("state_type") is not None or source != manager.kv_args.kv_data_ptrs:
        return original(manager, *args, **kwargs)
    layers, flags = _num_layers(items), manager.server_args
    there = manager.decode_kv_args_table[kwargs["mooncake_session_id"]].dst_kv_item_len
    if items[0] != there:
        logger.error(
            f"--kv-cache-dtype {flags.kv_cache_dtype}, --dtype {flags.dtype}: K of a page takes {items[0]} bytes here "
            f"and {there} on the decode server, so no KV is sent; give both servers the same flags"
        )
        return -1
    if not _same_layers(len(source), len(target), layers):
        return -1
    common = min(len(source), len(target)) // (2 * layers)
    if common > 1 and not same_items(items, target, layers, 1):
        _warn_once(
            "--kv-offload: the decode server has another `digest` in --kv-offload-config, so it gets no digests and "
            "computes its own; set the same on both servers"
        )
        common = 1

    def send(first: int, count: int, **others: Any) -> int:
        for name in ("src_data_ptrs", "item_lens", "dst_data_ptrs"):
            others[name] = of_groups(kwargs[name], layers, first, count)
        return original(manager, *args, **kwargs | others)

    if status := send(0, min(common, 2)):
        return status
    if common < 3 or not same_items(items, target, layers, 2):
        return 0
    last = {name: kwargs[name][-1:] for name in ("prefill_data_indices", "dst_data_indices")}
    row = (of_groups(values, layers, 2)[0] for values in (source, items))
    # No hint before the end of a prompt.
    return send(2, 1, **last) if has_hint(*row, int(last["prefill_data_indices"][0])) else 0


@hook(f"{_MOONCAKE}.send_kvcache_slice", "around")
def around_send_kvcache_slice(original, manager, session, pages, target, *args, **kwargs) -> int:
    """Omit the digests for a decode server with another `--tp-size`."""
    # It computes them. SGLang slices every buffer of the list by heads as if it held K or V.
    infos, layers = manager.kv_args, _num_layers(manager.kv_args.kv_item_lens)
    if not _same_layers(len(infos.kv_data_ptrs), len(target), layers):
        return -1
    if len(set(infos.kv_item_lens)) > 1:
        manager, infos = copy.copy(manager), copy.copy(infos)
        infos.kv_data_ptrs = of_groups(infos.kv_data_ptrs, layers, 0)
        manager.kv_args = infos
        target = of_groups(target, layers, 0)
    return original(manager, session, pages, target, *args, **kwargs)


@hook("disaggregation.common.conn.CommonKVManager._connect", "around")
def around_connect_to_decode(original, manager, *args, **kwargs) -> SimpleNamespace:
    """Serialise messages, as several threads share a socket; survive the loss of a decode server."""
    # Parts of two messages could merge. If sending raised, the thread would end, and with it the transfers to all
    # others.
    sock = original(manager, *args, **kwargs)

    def send_multipart(parts: Sequence[bytes]) -> None:
        try:
            with manager._socket_lock:
                sock.send_multipart(parts)
        except zmq.ZMQError as error:
            logger.info(f"--kv-offload: a decode server is gone, its requests fail: {error}")

    return SimpleNamespace(send_multipart=send_multipart)
