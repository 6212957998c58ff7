"""The hook functions of a prefill server; ``hooks.py`` says where and why."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.memory import bytes_beside_digests
from sglang_scout.plugin import status
from sglang_scout.plugin.allocator import DigestListener
from sglang_scout.plugin.args import parse
from sglang_scout.plugin.pool import (
    DigestKVPool,
    build_pools,
    carries,
    num_layers,
    same_digests,
    without_digests,
)
from sglang_scout.plugin.support import model_shape, rank_weights

logger = logging.getLogger(__name__)


@functools.cache
def _warn_of_other_digests() -> None:
    """Once."""
    logger.warning(
        "--kv-offload: the decode server has another `digest` in --kv-offload-config; none are sent, it computes its "
        "own. Give both servers the same"
    )


def around_profile_available_bytes(
    original: Callable[..., int], runner: Any, *args: Any, **kwargs: Any
) -> int:
    """Bytes for the KV pages of this rank: what SGLang finds, less the digests that will lie beside them."""
    available, config = original(runner, *args, **kwargs), parse(runner.server_args)
    if not config.prefill_digests:
        return available
    return bytes_beside_digests(model_shape(runner), config.digest, available)


def around_init_pools(original: Callable[..., None], runner: Any) -> None:
    config: OffloadConfig = parse(runner.server_args)
    wanted = DigestKVPool if config.prefill_digests else MHATokenToKVPool
    pool = build_pools(original, runner, wanted, wanted)
    if isinstance(pool, DigestKVPool):
        pool.attach(model_shape(runner), config.digest, rank_weights(config))
        runner.token_to_kv_pool_allocator.listener = DigestListener(pool.digests)


def before_send_kv_chunk(
    scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None
) -> None:
    """Digests of the full pages of this chunk, while their K is still on the device."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if not isinstance(pool, DigestKVPool):
        return
    size = pool.page_size
    end = end_idx
    if end is None:
        end = min(req.extend_range.end, len(req.origin_input_ids))
    first = req.start_send_idx // size * size
    locations = scheduler.req_to_token_pool.req_to_token[
        req.req_pool_idx, first : end // size * size : size
    ]
    pages = (locations // size).cpu().numpy().astype("int64")
    pool.digests.build(pages[~pool.digests.valid[pages]], pool.host_pages)


def before_send_kvcache(manager: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """A decode server without digests, or with others, gets K and V only; SGLang would pair V with digests."""
    source, target = kwargs["src_data_ptrs"], kwargs["dst_data_ptrs"]
    of_kv = kwargs.get("state_type") is None and source == manager.kv_args.kv_data_ptrs
    if not of_kv:
        return (manager, *args), kwargs
    layers = num_layers(kwargs["item_lens"])
    if not carries(len(target), layers):
        raise RuntimeError(
            f"--kv-offload: {len(source)} buffers here, {len(target)} on the decode server: "
            "the two serve different models, or only one uses pipeline parallelism"
        )
    is_same = len(source) == len(target)
    if is_same and len(source) == 4 * layers:
        is_same = same_digests(kwargs["item_lens"], target, layers)
        if not is_same:
            _warn_of_other_digests()
    if not is_same:
        for name in ("src_data_ptrs", "item_lens", "dst_data_ptrs"):
            kwargs[name] = without_digests(kwargs[name], layers)
    return (manager, *args), kwargs


def around_send_kvcache_slice(
    original: Callable[..., int],
    manager: Any,
    session: str,
    pages: Any,
    target: list[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """A decode server of another --tp-size gets the K and V of its heads, and computes the digests.

    SGLang cuts every buffer of the list by heads as if it held K or V.
    """
    infos = manager.kv_args
    if len(set(infos.kv_item_lens)) > 1:
        layers = num_layers(infos.kv_item_lens)
        manager, infos = copy.copy(manager), copy.copy(infos)
        infos.kv_data_ptrs = without_digests(infos.kv_data_ptrs, layers)
        manager.kv_args = infos
        if carries(len(target), layers):
            target = without_digests(target, layers)
    return original(manager, session, pages, target, *args, **kwargs)


def after_get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    result.internal_state["kv_offload"] = status.prefill_state(scheduler)
    return result
