"""Requests in flight during faults of the servers, and their outcomes."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from servers.sglang_http import (
    Generation,
    RequestFailed,
    generate_payload,
    http_json,
    parse_generation,
)


@dataclass(frozen=True)
class Outcome:
    """A client's result: its answer, or an error message; and when, in s from its start."""

    answer: Generation | None
    error: str
    after_s: float


def ask(send: Callable[[dict[str, Any]], Any], prompt: Sequence[int], new_tokens: int) -> Outcome:
    """One request, as the body of ``/generate``, that ``send`` sends."""
    begin = time.monotonic()
    answer, error = None, ""
    try:
        answer = parse_generation(send(generate_payload(prompt, new_tokens)))
    except (RequestFailed, OSError, http.client.HTTPException) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Outcome(answer, error, time.monotonic() - begin)


class InFlight:
    """All ``prompts`` at once, each with its number of new tokens, until :meth:`outcomes`.

    Args:
        send: as for :func:`ask`; or the URL of a server or a router.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], Any] | str,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
    ) -> None:
        if isinstance(send, str):
            url = send + "/generate"

            def send(payload: dict[str, Any]) -> Any:
                return http_json(url, payload, timeout_s=300)

        self._pool = ThreadPoolExecutor(len(prompts))
        self._futures = [
            self._pool.submit(ask, send, prompt, count)
            for prompt, count in zip(prompts, new_tokens, strict=True)
        ]

    def ended(self) -> int:
        """How many have an outcome."""
        return sum(future.done() for future in self._futures)

    def outcomes(self, timeout_s: float) -> list[Outcome]:
        """In the order of the prompts. Fails if one has none within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        try:
            return [f.result(max(0.0, deadline - time.monotonic())) for f in self._futures]
        except TimeoutError:
            raise AssertionError(
                f"{len(self._futures) - self.ended()} of {len(self._futures)} requests hang "
                f"{timeout_s:g} s later"
            ) from None
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def assert_right(outcomes: Sequence[Outcome], expected: Sequence[Generation]) -> None:
    """Every answer is a prefix of the expected tokens, and every error has a message."""
    for i, (outcome, want) in enumerate(zip(outcomes, expected, strict=True)):
        if outcome.answer is None:
            assert len(outcome.error) > 20, f"request {i}: {outcome.error!r} says nothing"
            continue
        got = outcome.answer.output_ids
        assert got == want.output_ids[: len(got)], f"request {i}: {got}, expected {want.output_ids}"


def watch(url: str) -> None:
    """Ask a server for its state, as a dashboard does, until it is gone."""

    def ask_on() -> None:
        with contextlib.suppress(RequestFailed, OSError, http.client.HTTPException):
            while True:
                http_json(url + "/server_info")

    threading.Thread(target=ask_on, daemon=True).start()
