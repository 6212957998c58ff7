"""The hooks of a decode server: its pools, requests, steps and results."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_scout.core.config import PAGE_SIZE_TOKENS
from sglang_scout.engine.memory import check_memory
from sglang_scout.plugin import status
from sglang_scout.plugin.backend import ScoutAttnBackend, current_backend
from sglang_scout.plugin.hooks import adapter, hook
from sglang_scout.plugin.limits import BACKEND_NAME
from sglang_scout.plugin.pools import HostKVPool, build_pools, pools_target
from sglang_scout.plugin.ranks import AttentionRanks, host_bytes, size_of
from sglang_scout.plugin.requests import answer_error
from sglang_scout.worker.host_memory import available_bytes, gib, pool_lacks

logger = logging.getLogger(__name__)

DENSE = "dense"
LEFT_BESIDE_COPIES = 2**29  # bytes of host memory
TRACED = "steps selected_pages cpu_pages recalled_pages gpu_wait_us recall_wait_us".split()
_DROPPED = (
    "The request was retracted because the KV pages ran out, and there is no host memory to keep a copy of its KV. "
    "Send it again later; the server needs fewer concurrent requests or more memory."
)
_GRAPHS = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

_device_bytes: int | None = None  # for digests and resident pages; None: the CPU device

register_attention_backend(BACKEND_NAME)(ScoutAttnBackend)


@hook(pools_target("_profile_available_bytes"), "around")
def around_profile_available_bytes(original, runner, *args, **kwargs) -> int:
    """Size the KV pool by host memory.

    Returns:
        Bytes for the KV pages of this rank. All ranks must get the same number of pages, as they allocate the same ids.
    """
    global _device_bytes
    on_cuda = torch.device(runner.device).type == "cuda"
    # Digests and resident pages share the memory that SGLang would give to KV pages.
    _device_bytes = original(runner, *args, **kwargs) if on_cuda else None
    # SGLang lowers the number of requests once the page count is known.
    size, cpus = size_of(runner, adapter.resolved(runner.server_args).max_running_requests)
    return host_bytes(size, list(cpus.by_node), AttentionRanks(), _device_bytes)


@hook(pools_target("_init_pools"), "around")
def around_init_pools(original, runner, **given):
    """Put the KV pool into the arena that the CPU attention process maps; use the allocator that reports pages."""
    tokens, max_batch = adapter.pool_sizes(runner, **given)
    size, cpus = size_of(runner, max_batch)
    num_pages, ranks = tokens // PAGE_SIZE_TOKENS + 1, AttentionRanks()
    # Every rank reads both before any allocates.
    in_pool = not pool_lacks(size.arena(num_pages), arenas=ranks.size)
    available, on_cpu = ranks.least(available_bytes()), torch.device(runner.device).type == "cpu"
    memory = {"in_pool": in_pool, "device_bytes": _device_bytes, "shared": on_cpu}
    plan = check_memory(size, num_pages, available, ranks=ranks.size, **memory)
    if tokens < size.context_tokens:
        logger.warning(
            f"host memory holds {tokens} tokens of KV, less than one context of {size.context_tokens}: longer requests "
            "are refused; raise --kv-offload-host-gb or --max-total-tokens"
        )
    build = functools.partial(original, runner, **given)
    of_rank = {"server_size": size, "plan": plan, "cpus": cpus}
    return build_pools(build, runner, functools.partial(HostKVPool, **of_rank))[0]


@hook("disaggregation.decode.DecodeTransferQueue.pop_transferred", "after")
def after_pop_transferred(result: list[Any], *args, **kwargs) -> list[Any]:
    """Notice that a request's KV has arrived."""
    backend = current_backend()
    hints = backend.pool.digests.hints
    for request in result:
        prompt = request.origin_input_ids
        pages = backend.tables.pages_of(adapter.row_of(request), len(prompt))
        n_full = len(prompt) // PAGE_SIZE_TOKENS
        if backend.dummy_kv is not None:
            backend.dummy_kv.fill(pages, prompt)
        hint = None if hints is None else hints.of(pages[-1], n_full)
        backend.engine.requests.arrive(request.rid, pages[:n_full], hint)
    return result


@hook("disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch", "around")
def around_get_new_prebuilt_batch(original, scheduler, *args):
    """Delay a request's admission until its first pages have been copied, so that no step waits for them."""
    queue, running = scheduler.waiting_queue, scheduler.running_batch
    if scheduler.enable_priority_scheduling:
        scheduler.policy.calc_priority(queue, running)
    room = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
    requests = current_backend().engine.requests
    waiting = requests.queue((r.rid for r in queue), max(room - running.batch_size(), 0))
    if running.is_empty() or not waiting:
        return original(scheduler, *args)
    scheduler.waiting_queue = [request for request in queue if request.rid not in waiting]
    batch = original(scheduler, *args)
    left = {request.rid for request in scheduler.waiting_queue} | waiting
    scheduler.waiting_queue = [request for request in queue if request.rid in left]
    return batch


@hook(
    "disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
    "after",
)
def after_prepare_for_prebuilt(_, batch) -> None:
    """Notice that a request joins the batch, new or after a retraction; take the digests that arrived with its KV."""
    backend, full = current_backend(), [np.zeros(0, np.int64)]
    for request, count in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        row = adapter.row_of(request)
        full.append(backend.tables.pages_of(row, count // PAGE_SIZE_TOKENS * PAGE_SIZE_TOKENS))
        # SGLang has capped max_new_tokens by the context.
        end = len(request.origin_input_ids) + request.sampling_params.max_new_tokens
        backend.engine.requests.admit(request.rid, row, end)
    backend.engine.pages.arrived(np.concatenate(full))


@hook("managers.schedule_batch.alloc_for_decode", "after")
def after_alloc_for_decode(result, batch, token_per_req: int):
    """Track on the host which pages a step allocates, row by row."""
    backend, rows = current_backend(), batch.req_pool_indices_cpu.numpy()
    backend.tables.open_pages(rows, batch.seq_lens_cpu.numpy(), backend.allocator.opened)
    return result


@hook(f"{_GRAPHS}.can_run_graph", "around")
def around_can_run_graph(original, runner, forward_batch) -> bool:
    """Begin the step before it is known whether a graph can run it."""
    if not forward_batch.forward_mode.is_decode():
        return original(runner, forward_batch)
    return current_backend().begin(forward_batch) and original(runner, forward_batch)


@hook(f"{_GRAPHS}.capture_one_shape", "around")
def around_capture_one_shape(
    original, runner, size: int, forward, stream: int | None = None, variant=None, *more
) -> None:
    """Capture a graph for dense steps too."""
    engine = current_backend().engine
    for label in (None, DENSE) if engine.has_dense_steps else (None,):
        engine.is_dense = label is not None
        original(runner, size, forward, stream, label, *more)
    engine.is_dense = False


@hook(f"{_GRAPHS}._resolve_lora_variant", "after")
def after_resolve_lora_variant(result, runner, forward_batch):
    """Select the step's graph, dense or with page selection, through SGLang's variants for LoRA, which is refused."""
    return DENSE if current_backend().engine.is_dense else result


@hook("models.utils.enable_fused_set_kv_buffer", "replace")
def no_fused_set_kv_buffer(forward_batch) -> bool:
    """On a GPU, keep models from fusing RoPE with the write of K and V, as the pages are in host memory."""
    return False


@hook(
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode",
    "around",
)
def around_process_batch_result(original, processor, batch, result) -> None:
    """Never return tokens of a step whose attention is incomplete, or of a request with a damaged page."""
    backend = current_backend()
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif torch.device(backend.pool.device).type == "cuda":
        torch.cuda.current_stream().synchronize()
    backend.engine.end_step()  # raises if tokens may be wrong
    damaged = backend.damaged_pages()
    _fail_owners(batch.reqs, damaged)
    original(processor, batch, result)
    if len(damaged):
        # All unused pages, damaged ones among them, so that no other request hits those.
        cache = processor.tree_cache
        cache.evict(EvictParams(num_tokens=cache.evictable_size()))


def _fail_owners(requests: Sequence[Any], damaged: npt.NDArray[np.int64]) -> None:
    """Abort the running ``requests`` that own a page of ``damaged`` ``[n, 2]``, layers and pages, without the token of
    the step that SGLang will process."""
    for request in requests if len(damaged) else ():
        if request.finished() or request.is_retracted:
            continue
        tokens = len(request.origin_input_ids) + len(request.output_ids)
        pages = current_backend().tables.pages_of(adapter.row_of(request), tokens)
        own = damaged[np.isin(damaged[:, 1], pages)]
        if not len(own):
            continue
        layer, page = own[0].tolist()
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        message = (
            f"The KV of this request has changed in host memory: page {page} of layer {layer}{more} does not match "
            "its checksum. Send the request again; if it happens again, the machine's memory is at fault."
        )
        logger.error("request %s fails: %s", request.rid, message)
        code = HTTPStatus.INTERNAL_SERVER_ERROR
        request.to_finish = FINISH_ABORT(message, code, "InternalServerError")
        request.finished_len = len(request.output_ids)
        request.skip_radix_cache_insert = True


@hook("managers.schedule_batch.Req.offload_kv_cache", "around")
def around_offload_kv_cache(original, req, tables, allocator) -> None:
    """Keep the KV of a retracted request only if there is memory for a copy.

    Either every rank keeps a copy of its part, or none does.
    """
    ranks, pool = AttentionRanks(), allocator.get_kvcache()
    needed = ranks.size * pool.copy_bytes(req.seqlen - 1)
    available = ranks.least(available_bytes())
    if available - needed >= LEFT_BESIDE_COPIES:
        original(req, tables, allocator)
        return
    req.kv_offload_dropped = True
    logger.error(
        f"request {req.rid} was retracted and fails: a copy of its KV needs {gib(needed)} of host memory, and "
        f"{gib(available)} are available; lower --max-running-requests, or free memory"
    )


@hook("managers.scheduler.Scheduler._add_request_to_queue", "around")
def around_add_request_to_queue(original, scheduler, req, *args, **kwargs) -> None:
    """Restore a retracted request from its KV, also after a pause; fail one whose KV was not kept."""
    if hasattr(req, "kv_offload_dropped"):
        answer_error(scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, _DROPPED)
    elif adapter.has_copy(req):
        # /pause_generation does not mark this, and would wait for the KV from the prefill server again.
        original(scheduler, req, is_retracted=True)
    else:
        original(scheduler, req, *args, **kwargs)


@hook("observability.trace.TraceReqContext.trace_slice", "before")
def before_trace_slice(context, slice, *_, **__) -> None:
    """With `--enable-trace`: add step counters as attributes to each token's span.

    They are the batch's, since the request's previous token.
    """
    if slice.slice_name == "decode_loop":
        counters = current_backend().engine.parts.counters
        now = {name: getattr(counters, name) for name in TRACED}
        before = getattr(context, "kv_offload_before", now)
        context.kv_offload_before = now
        slice.attrs.update({f"kv_offload.{name}": now[name] - before[name] for name in TRACED})


@hook("managers.scheduler.Scheduler.get_internal_state", "after")
def after_get_internal_state(result, scheduler, *args, **kwargs):
    """Add the state to `/server_info`."""
    backend = current_backend()
    result.internal_state["kv_offload"] = state = status.decode_state(backend)
    # All ranks are asked at once.
    state["ranks"] = backend.ranks.gather({key: state[key] for key in status.OF_EACH_RANK})
    return result
