"""The hook functions of a decode server; see ``hooks.py`` for targets and reasons."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.io_struct import AbortReq

from sglang_scout.engine.memory import check_memory
from sglang_scout.plugin import status
from sglang_scout.plugin.args import parse
from sglang_scout.plugin.backend import current_backend
from sglang_scout.plugin.damage import fail_owners, forget_cached
from sglang_scout.plugin.host_size import host_bytes, size_of
from sglang_scout.plugin.line import adapter
from sglang_scout.plugin.pool import HostKVPool, build_pools
from sglang_scout.plugin.ranks import AttentionRanks
from sglang_scout.plugin.support import model_shape, rank_weights
from sglang_scout.worker.arena_fits import pool_lacks
from sglang_scout.worker.host_memory import available_bytes, gib

logger = logging.getLogger(__name__)

DENSE = "dense"
LEFT_BESIDE_COPIES = 2**29  # bytes of host memory

_device_bytes: int | None = None  # for digests and resident pages; None: the CPU device


def around_profile_available_bytes(
    original: Callable[..., int], runner: Any, *args: Any, **kwargs: Any
) -> int:
    """Bytes for the KV pages of this rank: its share of host memory, independent of GPU memory.

    All ranks must get the same number of pages, as they allocate the same ids.
    """
    global _device_bytes
    config, ranks, shape = parse(runner.server_args), AttentionRanks(), model_shape(runner)
    on_cuda = torch.device(runner.device).type == "cuda"
    # Digests and resident pages share the memory that SGLang would give to KV pages.
    _device_bytes = original(runner, *args, **kwargs) if on_cuda else None
    return host_bytes(runner, config, shape, ranks, _device_bytes)


def around_init_pools(original: Callable[..., Any], runner: Any, **given: Any) -> Any:
    config, shape, ranks = parse(runner.server_args), model_shape(runner), AttentionRanks()
    tokens, max_batch = adapter.pool_sizes(runner, **given)
    num_pages, context = tokens // shape.page_size + 1, runner.model_config.context_len
    size, nodes = size_of(runner, config, shape, max_batch)
    # Every rank reads both before any allocates.
    in_pool = not pool_lacks(size.arena(num_pages), arenas=ranks.size)
    plan = check_memory(
        size,
        num_pages,
        ranks.least(available_bytes()),
        device_bytes=_device_bytes,
        in_pool=in_pool,
        shared=torch.device(runner.device).type == "cpu",
        ranks=ranks.size,
    )
    if tokens < context:
        logger.warning(
            "host memory holds %d tokens of KV, less than one context of %d: longer requests are "
            "refused; raise --kv-offload-host-gb or --max-total-tokens",
            tokens,
            context,
        )
    result, pool, _ = build_pools(
        functools.partial(original, runner, **given),
        runner,
        functools.partial(
            HostKVPool,
            arena_spec=size.arena_fields,
            numa_nodes=nodes,
            context_share=config.context_share,
        ),
        HostKVPool,
    )
    pool.attach(shape, plan, config.digest, rank_weights(config), plan.hint_bytes > 0)
    return result


def after_pop_transferred(result: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Requests whose KV has arrived."""
    current_backend().arrive(result)
    return result


def around_get_new_prebuilt_batch(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """While others decode, a request waits until copies of its first pages are in flight, during a step of theirs."""
    queue, running = scheduler.waiting_queue, scheduler.running_batch
    if scheduler.enable_priority_scheduling:
        scheduler.policy.calc_priority(queue, running)
    room = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
    arrivals = current_backend().engine.boundary.arrivals
    waiting = arrivals.queue((r.rid for r in queue), max(room - running.batch_size(), 0))
    if running.is_empty() or not waiting:
        return original(scheduler, *args)
    scheduler.waiting_queue = [request for request in queue if request.rid not in waiting]
    batch = original(scheduler, *args)
    left = {request.rid for request in scheduler.waiting_queue} | waiting
    scheduler.waiting_queue = [request for request in queue if request.rid in left]
    return batch


def after_prepare_for_prebuilt(_: None, batch: Any) -> None:
    """A batch of requests whose KV has arrived, or was restored after a retraction, joins."""
    current_backend().admit(batch.reqs, batch.seq_lens_cpu.tolist())


def around_process_batch_result(
    original: Callable[..., None], processor: Any, batch: Any, result: Any
) -> None:
    """Before a step's tokens are returned."""
    backend = current_backend()
    backend.check_results(result.copy_done)
    damaged = backend.damaged_pages()
    if not len(damaged):
        original(processor, batch, result)
        return
    fail_owners(batch.reqs, damaged, backend.pages_of)
    original(processor, batch, result)
    forget_cached(processor.tree_cache)


def after_alloc_for_decode(result: Any, batch: Any, token_per_req: int) -> Any:
    """Pages for the upcoming step have been allocated, row by row."""
    current_backend().announce_step(batch.req_pool_indices_cpu, batch.seq_lens_cpu)
    return result


def around_cumulate_penalty(original: Callable[[Any], None], batch: Any) -> None:
    """A step that overlaps its predecessor does not know the newest token: one server counts each token a step late,
    and in the first step after the prompt the prompt's last. Here the first token is known then, and is the newest in
    the next step too."""
    joined = [
        request
        for request in batch.reqs
        if batch.enable_overlap and request.decode_batch_idx == 0 and len(request.output_ids) == 1
    ]
    tokens = [request.output_ids.pop() for request in joined]
    original(batch)
    for request, token in zip(joined, tokens, strict=True):
        request.output_ids.append(token)


def around_offload_kv_cache(
    original: Callable[..., None], req: Any, tables: Any, allocator: Any
) -> None:
    """Either every rank keeps a copy of its part, or none does."""
    ranks, pool = AttentionRanks(), allocator.get_kvcache()
    needed = ranks.size * pool.copy_bytes(req.seqlen - 1)
    available = ranks.least(available_bytes())
    if available - needed >= LEFT_BESIDE_COPIES:
        original(req, tables, allocator)
        return
    adapter.drop_copy(req)
    logger.error(
        "request %s was retracted and fails: a copy of its KV needs %s of host memory, and %s are available; lower "
        "--max-running-requests, or free memory",
        req.rid, gib(needed), gib(available),
    )  # fmt: skip


def around_add_request_to_queue(
    original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> None:
    kept = adapter.kept_copy(req)
    if kept is None:
        original(scheduler, req, *args, **kwargs)
        return
    if kept:
        # /pause_generation does not mark this, and would wait for the KV from the prefill server again.
        original(scheduler, req, is_retracted=True)
        return
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": "The request was retracted because the KV pages ran out, and there is no host memory to keep a "
        "copy of its KV. Send it again later; the server needs fewer concurrent requests or more memory.",
    }
    scheduler.ipc_channels.send_to_tokenizer.send_output(
        AbortReq(finished_reason=reason, rid=req.rid), req
    )


def no_fused_set_kv_buffer(forward_batch: Any) -> bool:
    return False


def around_can_run_graph(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """Whether a graph covers the step is only known once it has begun."""
    if not forward_batch.forward_mode.is_decode():
        return original(runner, forward_batch)
    return current_backend().begin(forward_batch) and original(runner, forward_batch)


def around_capture_one_shape(
    original: Callable[..., None],
    runner: Any,
    size: int,
    forward: Any,
    stream: int | None = None,
    variant: None = None,
    *more: Any,
) -> None:
    """One graph for steps with page selection, another for dense ones."""
    engine = current_backend().engine
    for label in (None, DENSE) if engine.has_dense_steps else (None,):
        engine.is_dense = label is not None
        original(runner, size, forward, stream, label, *more)
    engine.is_dense = False


def after_resolve_lora_variant(result: Any, runner: Any, forward_batch: Any) -> Any:
    """Selects the graph to replay, through SGLang's variants for LoRA, which is refused."""
    return DENSE if current_backend().engine.is_dense else result


def after_get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    result.internal_state["kv_offload"] = status.decode_state_of_ranks(current_backend())
    return result
