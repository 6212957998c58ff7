"""HTTP requests to SGLang's servers and router, with the standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""For servers on this machine, which a proxy of the environment may not reach."""
JSON = "application/json"


class RequestFailed(RuntimeError):
    """A server refused or aborted a request; has the server's message."""


NO_ANSWER = (RequestFailed, OSError, http.client.HTTPException)
"""What a request raises when it has no answer."""


@dataclass(frozen=True)
class Generation:
    """One answer of ``/generate``; ``logprobs``, of each output token, is empty unless asked for."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


def _open(url: str, data: bytes | None, content_type: str, timeout_s: float) -> Any:
    """The response to GET, or to POST of ``data``, whatever its status; for a ``with`` block."""
    request = urllib.request.Request(url, data, {"Content-Type": content_type})
    try:
        return DIRECT.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error


def exchange(
    url: str, data: bytes | None = None, *, content_type: str = JSON, timeout_s: float = 600.0
) -> tuple[int, bytes]:
    """GET, or POST of ``data``: status and body, whatever the status; of a stream what came within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    body = b""
    with _open(url, data, content_type, timeout_s) as response:
        while (more := response.read1()) and time.monotonic() < deadline:
            body += more
        return response.status, body + more


def http_json(url: str, payload: Any = None, *, timeout_s: float = 600.0) -> Any:
    """GET, or POST when there is a payload; returns the decoded JSON (the text if it is not JSON).

    Raises RequestFailed for a status of 400 or more, OSError without an answer.
    """
    data = None if payload is None else json.dumps(payload).encode()
    status, body = exchange(url, data, timeout_s=timeout_s)
    text = body.decode(errors="replace")
    if status >= 400:
        raise RequestFailed(f"{url}: status {status}: {text[:2000]}")
    try:
        return json.loads(text)
    except ValueError:
        return text


def sse_events(url: str, payload: Any, *, timeout_s: float = 600.0) -> Iterator[dict[str, Any]]:
    """POST a streaming request and yield its events until ``[DONE]``.

    Closing the iterator closes the connection, like a client that disconnects. Raises RequestFailed for a status of 400
    or more and for an error event.
    """
    with _open(url, json.dumps(payload).encode(), JSON, timeout_s) as response:
        if response.status >= 400:
            detail = response.read().decode(errors="replace")[:2000]
            raise RequestFailed(f"{url}: status {response.status}: {detail}")
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(f"{url}: {event['error']}")
            yield event


def generate_payload(
    prompt: Sequence[int], max_new_tokens: int, *, logprobs: bool = False, stream: bool = False
) -> dict[str, Any]:
    """Body of one ``/generate`` request: greedy, and to the full length even past an end-of-text token."""
    options = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {
        "input_ids": [int(token) for token in prompt],
        "sampling_params": options,
        "return_logprob": logprobs,
        "stream": stream,
    }


def parse_generation(raw: Mapping[str, Any]) -> Generation:
    """Raises RequestFailed when the server reports an abort in place of an answer."""
    meta = raw["meta_info"]
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        raise RequestFailed(f"request aborted: {meta['finish_reason']}")
    scores = meta.get("output_token_logprobs") or []
    return Generation(
        output_ids=tuple(raw.get("output_ids") or (entry[1] for entry in scores)),
        logprobs=tuple(entry[0] for entry in scores),
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens", 0)),
    )


def generate(
    send: Callable[[dict[str, Any]], Any],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    logprobs: bool = False,
    concurrency: int | None = None,
) -> list[Generation]:
    """Answers in the order of the prompts, ``concurrency`` at a time (default all). Raises the first failure."""

    def one(prompt: Sequence[int]) -> Generation:
        return parse_generation(send(generate_payload(prompt, max_new_tokens, logprobs=logprobs)))

    pool = ThreadPoolExecutor(max_workers=concurrency or max(1, len(prompts)))
    try:
        return list(pool.map(one, prompts))
    finally:
        # No waiting: after Ctrl-C the servers are stopped, which ends the requests.
        pool.shutdown(wait=False, cancel_futures=True)
