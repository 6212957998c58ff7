"""Mends what SGLang itself does wrong in a scheduler process, and what harms other requests or the pair.

A hook names the releases that need it, if not all do, or the pull request that mends it. Drop it with the last of them.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from fastapi import HTTPException
from sglang.srt.disaggregation.base import KVPoll
from torch.nn.functional import scaled_dot_product_attention

from sglang_scout.plugin.hooks import hook
from sglang_scout.plugin.shutdown import answer_error

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1
HOLD_S = 2.0
"""Longer than the prefill server may still write to the pages of an ended request: one chunk of a prompt."""
MASK_ELEMENTS = 1 << 24
"""Maximum mask size, rows x KV tokens; rows are processed in chunks."""
_ANSWER_S = 0.05  # a step's time; a server that is well answers sooner
_PROBE_S = 2.0
on_decode = functools.partial(hook, roles="decode")
on_prefill = functools.partial(hook, roles="prefill")
_KV = "disaggregation.common.conn.CommonKV"


# Requests: taken up and aborted without harm to others.


@hook("managers.scheduler.Scheduler.handle_generate_request", "around")
def around_handle_generate_request(original, scheduler, request, **more) -> None:
    """Refuse a prompt that can never fit and would block the queue; if a request raises, fail only that one."""
    try:
        _check_size(scheduler, request)
        _check_room(scheduler, request.bootstrap_room)
        original(scheduler, request, **more)
    except Exception as error:
        if not isinstance(error, HTTPException):
            logger.exception("--kv-offload: request %s was refused", request.rid)
            _forget(scheduler, request.rid)
            message = f"The server cannot take up this request ({type(error).__name__}: {error})."
            error = HTTPException(HTTPStatus.BAD_REQUEST, message)
        answer_error(scheduler, request, error.status_code, error.detail)


def _check_size(scheduler: Any, request: Any) -> None:
    """SGLang reserves room, even on an idle server. A prompt that needs it would wait forever, and all behind it."""
    size, page = scheduler.max_total_num_tokens, scheduler.page_size
    if scheduler.server_args.disaggregation_mode == "decode":
        reserved = scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
        most, why = size - reserved, f"less {reserved} for --num-reserved-decode-tokens"
    else:
        most, why = size - page - 3, "less two pages"
    most, tokens = most // page * page, len(request.input_ids or ())
    if tokens > most:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"The prompt has {tokens} tokens, but this server accepts at most {most}: its KV pool has {size}, {why}.",
        )


def _check_room(scheduler: Any, room: int | None) -> None:
    """A status that the room has from an earlier request, or because the other half has already failed, would end the
    process."""
    of_decode = scheduler.server_args.disaggregation_mode == "decode"
    name = "disagg_decode_prealloc_queue" if of_decode else "disagg_prefill_bootstrap_queue"
    manager = getattr(scheduler, name).kv_manager
    statuses = getattr(manager, "request_status", {})
    if room is None or statuses.get(room) not in (KVPoll.Success, KVPoll.Failed):
        return
    if all(req.bootstrap_room != room for req in _held(scheduler)):
        for table in (statuses, getattr(manager, "transfer_infos", {})):
            table.pop(room, None)
    raise HTTPException(
        HTTPStatus.SERVICE_UNAVAILABLE,  # SGLang's router then sends it again
        f"The other half of this request has failed, or bootstrap_room {room} was used before. Send the request again "
        "with a new room.",
    )


def _held(scheduler: Any) -> Iterator[Any]:
    """SGLang's requests from their arrival to their end, some twice."""
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    if scheduler.server_args.disaggregation_mode == "decode":
        queue = scheduler.disagg_decode_prealloc_queue
        for entry in (*queue.queue, *scheduler.disagg_decode_transfer_queue.queue):
            yield entry.req
        yield from queue.retracted_queue
    else:
        yield from scheduler.disagg_prefill_bootstrap_queue.queue
        yield from scheduler.disagg_prefill_inflight_queue
    for name in ("running_batch", "last_batch", "cur_batch"):  # the last in 0.5.15.post1 only
        if (batch := getattr(scheduler, name, None)) is not None:
            yield from batch.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def _forget(scheduler: Any, rid: str) -> None:
    """Take a request whose arrival raised out of the queue that it may have reached."""
    waiting = scheduler.grammar_manager.grammar_queue
    waiting[:] = [req for req in waiting if req.rid != rid]
    if scheduler.server_args.disaggregation_mode == "decode":
        queue = scheduler.disagg_decode_prealloc_queue
        for entry in queue.queue:
            if entry.req.rid == rid:
                entry.kv_receiver.clear()
        queue.queue = [entry for entry in queue.queue if entry.req.rid != rid]
        queue.pending_reqs = [entry for entry in queue.pending_reqs if entry.req.rid != rid]
    else:
        queue = scheduler.disagg_prefill_bootstrap_queue
        queue.queue = [req for req in queue.queue if req.rid != rid]


@hook("managers.scheduler.Scheduler.abort_request", "around")
def around_abort_request(original, scheduler, request) -> None:
    """Abort the request with exactly this id, not every request whose id starts with it."""
    others = {}
    if not request.abort_all:
        others = {id(req): (req, req.rid) for req in _held(scheduler) if req.rid != request.rid}
    for req, _ in others.values():
        req.rid = ""  # for this moment it begins with no id
    try:
        original(scheduler, request)
    finally:
        for req, rid in others.values():
            req.rid = rid


@hook("managers.scheduler.Scheduler.on_idle", "before")
def before_on_idle(scheduler) -> None:
    """With `--sleep-on-idle`, do not busy-poll while requests are in transfer.

    SGLang sleeps only if it holds no request. The other server or an attention process may need the core.
    """
    if scheduler.idle_sleeper is not None and not scheduler.is_fully_idle():
        scheduler.idle_sleeper.poller.poll(IDLE_POLL_MS)  # ends at a message


@on_decode("managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", "around")
def around_cumulate_penalty(original, batch) -> None:
    """With penalties, do not count a request's first token twice.

    An overlapped step does not know its newest token, so SGLang counts each token a step late. After a transfer the
    first token is known in the first step, and is still the newest in the next.
    """
    reqs = batch.reqs if batch.enable_overlap else []
    joined = [r for r in reqs if r.decode_batch_idx == 0 and len(r.output_ids) == 1]
    tokens = [request.output_ids.pop() for request in joined]
    original(batch)
    for request, token in zip(joined, tokens, strict=True):
        request.output_ids.append(token)


# Transfers and lost servers of a pair.


@hook(f"{_KV}Manager.__init__", "before")
def before_kv_manager(*_, **__) -> None:
    """Do not ask the other server of the pair through a proxy."""
    # The model is loaded: from here on this process talks to other servers only.
    os.environ["no_proxy"] = "*"


@hook(
    "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_register",
    "around",
)
def around_batch_register(original, engine, pointers: list[int], lengths: list[int]) -> int:
    """End the server if the transfer engine rejects its memory; SGLang ignores that, and every transfer would fail.

    https://github.com/sgl-project/sglang/pull/33264 does so too.
    """
    error = original(engine, pointers, lengths)
    if error == 0:
        return error
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.3g} MiB"
    raise RuntimeError(
        f"--kv-offload: the transfer engine cannot register {len(pointers)} buffers of "
        f"{sum(lengths) / 2**30:.2f} GiB (error {error}; its own log lines above name the first one), so no KV can be "
        f"transferred. RDMA locks them in memory: the limit on locked memory is {locked}; make it unlimited (ulimit "
        "-l, LimitMEMLOCK of a service, --ulimit memlock=-1 of a container). The network device must have room for "
        "them: lower --kv-offload-host-gb, or raise its limits (max_mr and max_mr_size in ibv_devinfo -v). Buffers on "
        "a GPU (digests on a decode server, everything on a prefill server) also need the kernel module "
        "nvidia_peermem, or a mooncake with CUDA and WITH_NVIDIA_PEERMEM=0. To work without RDMA, set "
        "--disaggregation-transfer-backend mooncake_tcp"
    )


@on_decode({"0.5.15.post1": f"{_KV}Receiver._connect"}, "around")
def around_connect(original, receiver, endpoint: str, is_ipv6: bool = False):
    """Do not block forever on a message to a prefill server that is gone.

    SGLang's PUSH sockets do not reconnect, and one that has lost its peer blocks in ``send``, holding a lock that the
    heartbeat thread waits for. A new socket queues messages instead, and heartbeats fail the requests. Newer releases
    bound the wait: https://github.com/sgl-project/sglang/pull/31144.
    """
    connected = original(receiver, endpoint, is_ipv6)
    sock, lock = connected
    with lock:
        if sock.poll(0, zmq.POLLOUT):
            return connected
    receiver.disconnect_endpoint(endpoint)
    return original(receiver, endpoint, is_ipv6)


@on_decode(f"{_KV}Manager.try_ensure_parallel_info", "around")
def around_ensure_parallel_info(original, manager, address: str) -> bool:
    """Ask a prefill server for its ranks without blocking the steps of other requests.

    SGLang asks in the scheduler's thread, for 5 s if there is no answer, each second. It raises if the servers differ,
    for example in page size; here the requests of this address fail.
    """
    if address in manager.prefill_info_table:
        return True
    questions: dict[str, Future[bool]] = vars(manager).setdefault("kv_offload_questions", {})
    is_new = address not in questions
    if is_new:
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


@on_decode("disaggregation.mooncake.conn.MooncakeKVManager._on_heartbeat_success", "after")
def after_heartbeat_success(_, manager, address: str) -> None:
    """Notice that a prefill server was replaced between two heartbeats.

    Its bootstrap server at ``address`` answers. If nothing listens where its schedulers were, fail the requests that
    wait for them.
    """
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


@on_decode("disaggregation.utils._poll_with_failure_injection", "around")
def around_poll(original, receivers: Sequence[Any]) -> list[int]:
    """Notify the prefill server of an aborted transfer, and free its pages once they are no longer written.

    SGLang frees them at once, and another request may get them; here the transfer goes on for ``HOLD_S``.
    """
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


@on_prefill(f"{_KV}Manager._connect", "around")
def around_connect_to_decode(original, manager, *args, **kwargs) -> SimpleNamespace:
    """Serialise messages, as several threads share a socket; survive the loss of a decode server.

    Parts of two messages could merge, and a request whose message is lost waits forever. If sending raised, the thread
    would end, and with it the transfers to all others.
    """
    sock = original(manager, *args, **kwargs)

    def send_multipart(parts: Sequence[bytes]) -> None:
        try:
            with manager._socket_lock:
                sock.send_multipart(parts)
        except zmq.ZMQError as error:
            lost = "--kv-offload: a message to a decode server that is gone was lost: %s"
            logger.error(lost, error)

    return SimpleNamespace(send_multipart=send_multipart)


# 0.5.15.post1 only.


@on_decode(
    {"0.5.15.post1": "disaggregation.decode.DecodePreallocQueue.resume_retracted_reqs"}, "around"
)
def around_resume_retracted_reqs(original, queue, *args, **kwargs) -> list[Any]:
    """With the radix cache, free all pages of a retracted request.

    SGLang would look it up again, and neither lock the pages that it finds nor free those that they replace.
    """
    restored = original(queue, *args, **kwargs)
    for req in restored:
        # A lookup without a hit; ChunkCache has no such node and is queried again.
        req.last_node = getattr(queue.tree_cache, "root_node", None)
    return restored


@on_decode(
    {"0.5.15.post1": "disaggregation.decode.DecodePreallocQueue._resolve_pending_reqs"}, "around"
)
def around_resolve_pending_reqs(original, queue) -> None:
    """Forget a request of a lost prefill server once its client has left; otherwise it would crash this server."""
    queue.pending_reqs = [entry for entry in queue.pending_reqs if entry.kv_receiver is not None]
    original(queue)


@on_prefill({"0.5.15.post1": "disaggregation.prefill.PrefillBootstrapQueue.add"}, "around")
def around_add_to_bootstrap_queue(original, queue, req, num_kv_heads: int) -> None:
    """Answer with status 400 if a grammar does not compile, not with a token of a prompt put in its place."""
    if req.to_finish is None:
        original(queue, req, num_kv_heads)
        return
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, req.to_finish.message, status_code=req.to_finish.status_code)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)


@hook(
    {"0.5.15.post1": "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"},
    "around",
    package="xgrammar",  # with another --grammar-backend it need not be installed
)
def around_apply_vocab_mask(
    original, grammar, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """On a CPU, keep a request with a grammar from crashing the server."""
    if logits.device.type == "cpu":
        import xgrammar

        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
    else:
        original(grammar, logits, vocab_mask)


# Prefill attention on a CPU.


@on_prefill(
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
