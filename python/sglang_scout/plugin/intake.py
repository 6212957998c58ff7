"""How a scheduler takes up and aborts one request without harm to others; see ``hooks.py`` for targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.io_struct import AbortReq

logger = logging.getLogger(__name__)


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


def _most_tokens(scheduler: Any) -> tuple[int, str]:
    """With more a prompt would wait forever, and all behind it: SGLang also reserves room, even on an idle server."""
    size, page = scheduler.max_total_num_tokens, scheduler.page_size
    if scheduler.server_args.disaggregation_mode == "decode":
        reserved = scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
        most, why = size - reserved, f"less {reserved} for --num-reserved-decode-tokens"
    else:
        most, why = size - page - 3, "less two pages"
    return most // page * page, why


def _check_size(scheduler: Any, request: Any) -> None:
    most, why = _most_tokens(scheduler)
    if (tokens := len(request.input_ids or ())) > most:
        size = scheduler.max_total_num_tokens
        raise _Refusal(
            f"The prompt has {tokens} tokens, but this server accepts at most {most}: its KV pool has {size}, {why}."
        )


def _check_room(scheduler: Any, room: int | None) -> None:
    """A status of this room from before the request came would end the process, or the request: its other half may have
    failed already, or an earlier request had this room."""
    of_decode = scheduler.server_args.disaggregation_mode == "decode"
    name = "disagg_decode_prealloc_queue" if of_decode else "disagg_prefill_bootstrap_queue"
    manager = getattr(scheduler, name).kv_manager
    statuses = getattr(manager, "request_status", {})
    if room is None or statuses.get(room) not in (KVPoll.Success, KVPoll.Failed):
        return
    if all(req.bootstrap_room != room for req in _held(scheduler)):
        for table in (statuses, getattr(manager, "transfer_infos", {})):
            table.pop(room, None)
    message = (
        f"The other half of this request has failed, or bootstrap_room {room} was used before. Send the request again "
        "with a new room."
    )
    raise _Refusal(message, HTTPStatus.SERVICE_UNAVAILABLE)  # SGLang's router does so


class _Refusal(Exception):
    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


def around_handle_generate_request(
    original: Callable[..., None], scheduler: Any, request: Any, **more: Any
) -> None:
    try:
        _check_size(scheduler, request)
        _check_room(scheduler, request.bootstrap_room)
        original(scheduler, request, **more)
    except Exception as error:
        message, status = str(error), HTTPStatus.BAD_REQUEST
        if isinstance(error, _Refusal):
            status = error.status
        else:
            message = f"The server cannot take up this request ({type(error).__name__}: {error})."
            logger.exception("--kv-offload: request %s was refused", request.rid)
            _forget(scheduler, request.rid)
        reason = {"type": "abort", "status_code": status, "message": message}
        answer = AbortReq(rid=request.rid, finished_reason=reason)
        scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def _forget(scheduler: Any, rid: str) -> None:
    """Take a request whose arrival raised out of the queue that it may have reached."""
    scheduler.grammar_manager.grammar_queue[:] = [
        req for req in scheduler.grammar_manager.grammar_queue if req.rid != rid
    ]
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


def around_abort_request(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    """SGLang aborts every request whose id begins with the given one."""
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
