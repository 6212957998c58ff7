"""The hooks of a decode server: its pools, requests, steps and results."""

from __future__ import annotations

import functools
import logging
import math
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_scout.core.config import PAGE_SIZE_TOKENS
from sglang_scout.plugin.backend import ScoutAttnBackend, current_backend
from sglang_scout.plugin.hooks import adapter, hook, pools_target
from sglang_scout.plugin.limits import BACKEND_NAME
from sglang_scout.plugin.pools import HostKVPool, build_pools
from sglang_scout.plugin.ranks import rank_memory
from sglang_scout.plugin.requests import answer_error
from sglang_scout.worker.host_memory import available_bytes, gib

logger = logging.getLogger(__name__)

HOLD_S = 2.0  # longer than the prefill server may still write to an ended request's pages: a chunk
_ANSWER_S = 0.05  # a step's time; a server that is well answers sooner
_PROBE_S = 2.0
_KV = "disaggregation.common.conn.CommonKV"
DENSE = "dense"
LEFT_BESIDE_COPIES = 2**29  # bytes of host memory
_DROPPED = (
    "The request was retracted because the KV pages ran out, and there is no host memory to keep a copy of its KV. "
    "Send it again later; the server needs fewer concurrent requests or more memory."
)
_GRAPHS = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

register_attention_backend(BACKEND_NAME)(ScoutAttnBackend)


@hook(pools_target("_init_pools"), "around")
def around_init_pools(original, runner, **given):
    """Put the KV pool into the arena that the CPU attention process maps; use the allocator that reports pages."""
    tokens, max_batch = adapter.pool_sizes(runner, **given)
    memory = rank_memory(max_batch)
    plan = memory.plan(tokens // PAGE_SIZE_TOKENS + 1)
    if tokens < (context_tokens := memory.size.context_tokens):
        context_bytes = memory.ranks.size * (memory.size.context_pages + 1) * memory.size.page_bytes
        logger.warning(
            f"host pages hold {tokens} tokens, less than a context of {context_tokens}: longer requests are refused; "
            f"set --kv-offload-host-gb {math.ceil(context_bytes / 2**30 * 10) / 10} without --max-total-tokens, or "
            f"--context-length {tokens}"
        )
    build = functools.partial(original, runner, **given)
    return build_pools(build, runner, HostKVPool, memory=memory, plan=plan)[0]


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
def around_capture_one_shape(original, runner, size, forward, stream=None, variant=None, *more):
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
        if not len(own := damaged[np.isin(damaged[:, 1], pages)]):
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
        request.finished_len, request.skip_radix_cache_insert = len(request.output_ids), True


@hook("managers.schedule_batch.Req.offload_kv_cache", "around")
def around_offload_kv_cache(original, req, tables, allocator) -> None:
    """Keep the KV of a retracted request only if there is memory for a copy."""
    # Either every rank keeps a copy of its part, or none does.
    pool = allocator.get_kvcache()
    needed = pool.ranks.size * pool.copy_bytes(req.seqlen - 1)
    available = pool.ranks.least(available_bytes())
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


@hook({"0.5.15.post1": f"{_KV}Receiver._connect"}, "around")
def around_connect(original, receiver, endpoint: str, is_ipv6: bool = False):
    """Do not block forever on a message to a prefill server that is gone."""
    # SGLang's PUSH sockets do not reconnect, and one that has lost its peer blocks in send, holding a lock that the
    # heartbeat thread waits for. A new one queues messages. Mended by https://github.com/sgl-project/sglang/pull/31144.
    sock, lock = original(receiver, endpoint, is_ipv6)
    with lock:
        if sock.poll(0, zmq.POLLOUT):
            return sock, lock
    receiver.disconnect_endpoint(endpoint)
    return original(receiver, endpoint, is_ipv6)


@hook(f"{_KV}Manager.try_ensure_parallel_info", "around")
def around_ensure_parallel_info(original, manager, address: str) -> bool:
    """Ask a prefill server for its ranks without blocking the steps of other requests."""
    # SGLang asks in the scheduler's thread, for 5 s if there is no answer, each second. It raises if the servers
    # differ, for example in page size; here the requests of this address fail.
    if address in manager.prefill_info_table:
        return True
    questions: dict[str, Future[bool]] = vars(manager).setdefault("kv_offload_questions", {})
    if is_new := address not in questions:
        questions[address] = ThreadPoolExecutor(1).submit(original, manager, address)
    try:
        answer = questions[address].result(_ANSWER_S if is_new else 0)
    except TimeoutError:
        return False
    except Exception as error:
        answer = False
        logger.error("--kv-offload: %s", error)
        for room in list(manager.addr_to_rooms_tracker[address]):
            manager.record_failure(room, str(error))
            manager.update_status(room, KVPoll.Failed)
    del questions[address]
    return answer


@hook("disaggregation.mooncake.conn.MooncakeKVManager._on_heartbeat_success", "after")
def after_heartbeat_success(_, manager, address: str) -> None:
    """Notice that a prefill server was replaced between two heartbeats."""
    # Its bootstrap server at address answers, but nothing listens where its schedulers were.
    with manager.connection_lock:
        pool = list(manager.connection_pool.items())
    for info in (info for key, infos in pool if key.startswith(f"{address}_") for info in infos):
        try:
            socket.create_connection((info["rank_ip"], info["rank_port"]), _PROBE_S).close()
        except ConnectionRefusedError:
            manager._handle_node_failure(address)
            return
        except OSError:  # slow, or no descriptor left: not proof that it is gone
            pass


@hook("disaggregation.utils._poll_with_failure_injection", "around")
def around_poll(original, receivers: Sequence[Any]) -> list[int]:
    """Notify the prefill server of an aborted transfer, and free its pages once they are no longer written."""
    # SGLang frees them at once, and another request may get them; here the transfer goes on for HOLD_S.
    return [_kept(*polled) for polled in zip(receivers, original(receivers), strict=True)]


def _kept(receiver: Any, status: int) -> int:
    if status != KVPoll.Failed or getattr(receiver, "init_time", None) is None:  # no page was named
        return status
    if "kv_offload_failed_s" not in vars(receiver):
        receiver.kv_offload_failed_s = time.monotonic()
        receiver.conclude_state = KVPoll.Failed
        # SGLang does not notify the prefill server if this side gave up: it would write much later.
        if not receiver.abort_notified:
            receiver._send_abort_notification()
            receiver.abort_notified = True
    held = time.monotonic() - receiver.kv_offload_failed_s < HOLD_S
    return int(KVPoll.Transferring if held else KVPoll.Failed)
