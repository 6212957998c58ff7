"""The end at SIGTERM, in bounded time; ``hooks.py`` says where.

1. The process of the HTTP port refuses new requests, and tells its schedulers, which refuse those that wait.
2. What runs may end, for ``DRAIN_S``. Whatever is left then gets an error.
3. SGLang's own handler goes on: it asks the schedulers to end, which its event loops of a prefill-decode pair do not
   hear, so they end themselves, and then ends what is left.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import AbortReq, ShutdownReq

DRAIN_S = 12.0
POLL_S = 0.1
ANSWERS_S = 0.5  # for the last answers to leave, before SGLang stops the event loop

REFUSAL = "The server is shutting down. Send the request to another one, or again later."


def _refused(rid: str) -> AbortReq:
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": REFUSAL,
    }
    return AbortReq(rid=rid, finished_reason=reason)


def refuse_new(manager: Any, request: Any) -> None:
    """Refuse a request that comes after the signal.

    Raises:
        HTTPException: status 503.
        ValueError: in a stream, whose status has been sent.
    """
    if not manager.gracefully_exit:
        return
    if request.stream:
        raise ValueError(REFUSAL)
    raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, REFUSAL)


async def around_sigterm_watchdog(original: Callable[[], Awaitable[None]], manager: Any) -> None:
    """Runs for as long as the server does."""
    while not manager.gracefully_exit:
        await asyncio.sleep(POLL_S)
    deadline = time.monotonic() + DRAIN_S
    manager._dispatch_to_scheduler(ShutdownReq())
    while manager.rid_to_state and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    if manager.rid_to_state:
        for rid in list(manager.rid_to_state):
            manager._handle_abort_req(_refused(rid))
        manager.rid_to_state.clear()  # health checks, which have no such answer
        manager.abort_request(abort_all=True)  # tells the other server
    await asyncio.sleep(ANSWERS_S)
    await original(manager)


def around_handle_shutdown(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    """The first time refuse what waits, the second time end.

    What is being transferred does not wait: its pages may not be given to another request before the sender has
    stopped.
    """
    if scheduler.gracefully_exit:
        _end(scheduler)
    original(scheduler, request)
    if scheduler.server_args.disaggregation_mode == "decode":
        waiting = [entry.req for entry in scheduler.disagg_decode_prealloc_queue.queue]
    else:
        waiting = [*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.waiting_queue]
    for req in waiting:
        # First the answer: what SGLang says of such a request has another sentence, and is ignored then.
        scheduler.ipc_channels.send_to_tokenizer.send_output(_refused(req.rid), req)
        scheduler.abort_request(AbortReq(rid=req.rid))


def _end(scheduler: Any) -> None:
    if scheduler.server_args.disaggregation_mode == "decode":
        from sglang_scout.plugin.backend import current_backend

        current_backend().close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the threads of SGLang's transfer never end, and an interpreter waits for them
