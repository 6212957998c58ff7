"""Requests in a scheduler: taken up, aborted and ended without harm to others; and SIGTERM, in bounded time.

1. The HTTP process refuses new requests, and tells its schedulers, which refuse waiting ones.
2. Running requests may finish, for ``DRAIN_S``. The rest then gets an error.
3. SGLang's own handler continues: it asks the schedulers to end, which they do, and then kills what is left.
4. SGLang 0.5.23 then waits for the last answers. One that a scheduler owes, as to ``/server_info``, never comes, so the
   wait is ``LAST_ANSWERS_S`` here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import HTTPException
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.io_struct import AbortReq, ShutdownReq

from sglang_scout.plugin.hooks import hook

logger = logging.getLogger(__name__)

DRAIN_S = 12.0
POLL_S = 0.1
ANSWERS_S = 0.5  # to send the last answers, before SGLang stops the event loop
LAST_ANSWERS_S = 3.0
IDLE_POLL_MS = 1

_OLD = "0.5.15.post1"
_DECODE_QUEUE = "disaggregation.decode.DecodePreallocQueue"
REFUSAL = "The server is shutting down. Send the request to another server, or again later."


def aborted(rid: str, status: int, message: str) -> AbortReq:
    """SGLang's answer to a request that ends with an error."""
    reason = {"type": "abort", "status_code": status, "message": message}
    return AbortReq(rid=rid, finished_reason=reason)


def answer_error(scheduler: Any, request: Any, status: int, message: str) -> None:
    answer = aborted(request.rid, status, message)
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def refuse(request: Any, status: int, message: str) -> NoReturn:
    """Refuse a ``request`` in the HTTP process: raises an HTTPException, or a ValueError if the status is 400, or of a
    stream, whose status has already been sent."""
    if status == HTTPStatus.BAD_REQUEST or request.stream:
        raise ValueError(message)
    raise HTTPException(status, message)


def is_decode(scheduler: Any) -> bool:
    return bool(scheduler.server_args.disaggregation_mode == "decode")


def _first_queue(scheduler: Any) -> Any:
    """Where a request waits for its other half, and on a decode server, with an entry for each, for pages."""
    if is_decode(scheduler):
        return scheduler.disagg_decode_prealloc_queue
    return scheduler.disagg_prefill_bootstrap_queue


def _request(entry: Any) -> Any:
    return getattr(entry, "req", entry)


def _held(scheduler: Any) -> list[Any]:
    """SGLang's requests from their arrival to their end, some twice."""
    queue, more = _first_queue(scheduler), getattr(scheduler, "disagg_prefill_inflight_queue", ())
    if is_decode(scheduler):
        more = [*scheduler.disagg_decode_transfer_queue.queue, *queue.retracted_queue]
    waiting = *scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue
    held = [*waiting, *map(_request, (*queue.queue, *more))]
    for name in ("running", "last", "cur"):  # the last in 0.5.15.post1 only
        held += getattr(getattr(scheduler, f"{name}_batch", None), "reqs", ())
    return held if scheduler.chunked_req is None else [*held, scheduler.chunked_req]


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
    most, why = size - page - 3, "less two pages"
    if is_decode(scheduler):
        reserved = scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
        most, why = size - reserved, f"less {reserved} for --num-reserved-decode-tokens"
    most, tokens = most // page * page, len(request.input_ids or ())
    if tokens > most:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"The prompt has {tokens} tokens, but this server accepts at most {most}: its KV pool has {size}, {why}.",
        )


def _check_room(scheduler: Any, room: int | None) -> None:
    """A status that the room has from an earlier request, or because the other half has already failed, would end the
    process."""
    manager = _first_queue(scheduler).kv_manager
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


def _forget(scheduler: Any, rid: str) -> None:
    """Take a request whose arrival raised out of the queues that it may have reached."""
    queue = _first_queue(scheduler)
    for entry in queue.queue:
        if hasattr(entry, "kv_receiver") and entry.req.rid == rid:
            entry.kv_receiver.clear()
    waiting = scheduler.grammar_manager.grammar_queue
    for entries in (queue.queue, getattr(queue, "pending_reqs", []), waiting):
        entries[:] = [entry for entry in entries if _request(entry).rid != rid]


@hook("managers.scheduler.Scheduler.abort_request", "around")
def around_abort_request(original, scheduler, request) -> None:
    """Abort the request with exactly this id, not every request whose id starts with it."""
    held = [] if request.abort_all else [(req, req.rid) for req in _held(scheduler)]
    for req, rid in held:
        req.rid = rid if rid == request.rid else ""  # for this moment it begins with no id
    try:
        original(scheduler, request)
    finally:
        for req, rid in held:
            req.rid = rid


@hook("managers.scheduler.Scheduler.on_idle", "before")
def before_on_idle(scheduler) -> None:
    """With `--sleep-on-idle`, do not busy-poll while requests are in transfer."""
    # SGLang sleeps only if it holds no request.
    if scheduler.idle_sleeper is not None and not scheduler.is_fully_idle():
        scheduler.idle_sleeper.poller.poll(IDLE_POLL_MS)  # ends at a message


@hook(
    "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", "around", roles="decode"
)
def around_cumulate_penalty(original, batch) -> None:
    """With penalties, do not count a request's first token twice."""
    # An overlapped step does not know its newest token, so SGLang counts each a step late. After a transfer the first
    # one is known at once, and is still the newest in the next step.
    reqs = batch.reqs if batch.enable_overlap else []
    joined = [r for r in reqs if r.decode_batch_idx == 0 and len(r.output_ids) == 1]
    tokens = [request.output_ids.pop() for request in joined]
    original(batch)
    for request, token in zip(joined, tokens, strict=True):
        request.output_ids.append(token)


@hook({_OLD: "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"}, "around")
def around_apply_vocab_mask(original, grammar, logits, vocab_mask) -> None:
    """On a CPU, keep a request with a grammar from crashing the server."""
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    import xgrammar  # takes a second

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


@hook({_OLD: "disaggregation.prefill.PrefillBootstrapQueue.add"}, "around", roles="prefill")
def around_add_to_bootstrap_queue(original, queue, req, num_kv_heads: int) -> None:
    """Answer with status 400 if a grammar does not compile, not with a token of a prompt put in its place."""
    if req.to_finish is None:
        original(queue, req, num_kv_heads)
        return
    prepare_abort(req, req.to_finish.message, status_code=req.to_finish.status_code)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)


@hook({_OLD: f"{_DECODE_QUEUE}.resume_retracted_reqs"}, "around", roles="decode")
def around_resume_retracted_reqs(original, queue, *args, **kwargs) -> list[Any]:
    """With the radix cache, free all pages of a retracted request."""
    # SGLang would look it up, and neither lock the pages that it finds nor free those that they replace.
    restored = original(queue, *args, **kwargs)
    for req in restored:
        # A lookup without a hit; ChunkCache has no such node and is queried again.
        req.last_node = getattr(queue.tree_cache, "root_node", None)
    return restored


@hook({_OLD: f"{_DECODE_QUEUE}._resolve_pending_reqs"}, "around", roles="decode")
def around_resolve_pending_reqs(original, queue) -> None:
    """Forget a request of a lost prefill server once its client has left; otherwise it would crash this server."""
    queue.pending_reqs = [entry for entry in queue.pending_reqs if entry.kv_receiver is not None]
    original(queue)


@hook("disaggregation.common.conn.CommonKVManager.__init__", "before")
def before_kv_manager(*_, **__) -> None:
    """Do not ask the other server of the pair through a proxy."""
    # The model has been loaded.
    os.environ["no_proxy"] = "*"


@hook("managers.tokenizer_manager.TokenizerManager.sigterm_watchdog", "around", roles="http")
async def around_sigterm_watchdog(original, manager) -> None:
    """Shut down in bounded time: finish running requests, refuse the rest."""
    while not manager.gracefully_exit:
        await asyncio.sleep(POLL_S)
    deadline = time.monotonic() + DRAIN_S
    manager._dispatch_to_scheduler(ShutdownReq())
    while manager.rid_to_state and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    if manager.rid_to_state:
        for rid in list(manager.rid_to_state):
            manager._handle_abort_req(aborted(rid, HTTPStatus.SERVICE_UNAVAILABLE, REFUSAL))
        manager.rid_to_state.clear()  # health checks, which cannot get such an answer
        manager.abort_request(abort_all=True)  # tells the other server
    await asyncio.sleep(ANSWERS_S)
    await original(manager)
    await asyncio.sleep(LAST_ANSWERS_S)  # cancelled if the server ends before
    _exit()


@hook("managers.scheduler.Scheduler.handle_shutdown", "replace")
def handle_shutdown(scheduler, request) -> None:
    """At SIGTERM refuse waiting requests and complete running ones, which SGLang would drop or ignore."""
    # The first call refuses, the second ends the process. Requests in transfer are not refused: the sender may still
    # write to their pages.
    if hasattr(scheduler, "kv_offload_ending"):
        if is_decode(scheduler):
            from sglang_scout.plugin.backend import current_backend

            current_backend().close()
        _exit()  # SGLang's transfer threads never end, and interpreter exit waits for them
    scheduler.kv_offload_ending = True
    waiting = [_request(entry) for entry in _first_queue(scheduler).queue]
    for req in waiting + ([] if is_decode(scheduler) else scheduler.waiting_queue):
        # Answer first: SGLang's own answer for such a request differs, and is ignored afterwards.
        answer_error(scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, REFUSAL)
        scheduler.abort_request(AbortReq(rid=req.rid))


def _exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
