"""Shutdown at SIGTERM, in bounded time.

1. The HTTP process refuses new requests, and tells its schedulers, which refuse waiting ones.
2. Running requests may finish, for ``DRAIN_S``. The rest then gets an error.
3. SGLang's own handler continues: it asks the schedulers to end, which they do, and then kills what is left.
4. SGLang 0.5.23 then waits for the last answers. One that a scheduler owes, as to ``/server_info``, never comes, so the
   wait is ``LAST_ANSWERS_S`` here.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import HTTPException
from sglang.srt.managers.io_struct import AbortReq, ShutdownReq

from sglang_scout.plugin.hooks import hook

DRAIN_S = 12.0
POLL_S = 0.1
ANSWERS_S = 0.5  # to send the last answers, before SGLang stops the event loop
LAST_ANSWERS_S = 3.0

REFUSAL = "The server is shutting down. Send the request to another server, or again later."


def aborted(rid: str, status: int, message: str) -> AbortReq:
    """SGLang's answer to a request that ends with an error."""
    reason = {"type": "abort", "status_code": status, "message": message}
    return AbortReq(rid=rid, finished_reason=reason)


def answer_error(scheduler: Any, request: Any, status: int, message: str) -> None:
    """Answer a ``request`` of a scheduler with an error."""
    answer = aborted(request.rid, status, message)
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def refuse(request: Any, status: int, message: str) -> NoReturn:
    """Refuse a ``request`` in the HTTP process.

    Raises:
        HTTPException: with this status.
        ValueError: status 400, or a stream, whose status has already been sent.
    """
    if status == HTTPStatus.BAD_REQUEST or request.stream:
        raise ValueError(message)
    raise HTTPException(status, message)


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


@hook("managers.scheduler.Scheduler.handle_shutdown", "replace", roles="decode prefill")
def handle_shutdown(scheduler, request) -> None:
    """At SIGTERM refuse waiting requests and complete running ones, which SGLang would drop or ignore.

    The first call refuses, the second ends the process. SGLang's would end the event loop with what runs (0.5.23), or
    do nothing (0.5.15). Requests in transfer are not refused: the sender may still write to their pages.
    """
    of_decode = scheduler.server_args.disaggregation_mode == "decode"
    if hasattr(scheduler, "kv_offload_ending"):
        if of_decode:
            from sglang_scout.plugin.backend import current_backend

            current_backend().close()
        _exit()  # SGLang's transfer threads never end, and interpreter exit waits for them
    scheduler.kv_offload_ending = True
    if of_decode:
        waiting = [entry.req for entry in scheduler.disagg_decode_prealloc_queue.queue]
    else:
        waiting = [*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.waiting_queue]
    for req in waiting:
        # Answer first: SGLang's own answer for such a request differs, and is ignored afterwards.
        answer_error(scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, REFUSAL)
        scheduler.abort_request(AbortReq(rid=req.rid))


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
