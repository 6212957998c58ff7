"""Clients of a pair of servers during faults, and the outcomes of their requests."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from harness import random_prompts
from servers.pd_cluster import PDCluster
from servers.sglang_http import (
    JSON,
    NO_ANSWER,
    Generation,
    generate_payload,
    http_json,
    parse_generation,
    sse_events,
)

CLIENTS_LEAVE_S = 120.0  # for a client's last request at the end

Send = Callable[[dict[str, Any]], Any]  # of the body of /generate, returns the answer


@dataclass(frozen=True)
class Outcome:
    """A client's result: its answer, or an error message."""

    answer: Generation | None
    error: str


def ask(send: Send, prompt: Sequence[int], new_tokens: int) -> Outcome:
    try:
        return Outcome(parse_generation(send(generate_payload(prompt, new_tokens))), "")
    except NO_ANSWER as failure:
        return Outcome(None, f"{type(failure).__name__}: {failure}")


class InFlight:
    """All ``prompts`` at once, each with its number of new tokens. ``send`` may be a URL."""

    def __init__(
        self, send: Send | str, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]
    ) -> None:
        if isinstance(send, str):
            send = partial(http_json, send + "/generate", timeout_s=300)
        self._pool = ThreadPoolExecutor(len(prompts))
        requests = zip(prompts, new_tokens, strict=True)
        self._futures = [self._pool.submit(ask, send, *request) for request in requests]

    def ended(self) -> int:
        """How many have an outcome."""
        return sum(future.done() for future in self._futures)

    def outcomes(self, timeout_s: float) -> list[Outcome]:
        """In the order of the prompts. Fails if one has none within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        try:
            return [f.result(max(0.0, deadline - time.monotonic())) for f in self._futures]
        except TimeoutError:
            hang = f"{len(self._futures) - self.ended()} of {len(self._futures)} requests hang"
            raise AssertionError(f"{hang} {timeout_s:g} s later") from None
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
        with contextlib.suppress(*NO_ANSWER):
            while True:
                http_json(url + "/server_info")

    threading.Thread(target=ask_on, daemon=True).start()


def begin_stream(url: str, prompt: Sequence[int], new_tokens: int) -> http.client.HTTPConnection:
    """Request an answer. Returns the connection, which the caller closes."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    body = json.dumps(generate_payload(prompt, new_tokens, stream=True))
    connection.request("POST", "/generate", body, {"Content-Type": JSON})
    return connection


class Load:
    """Clients that send one streamed request after the other. ``with`` starts them; at its end they stop.

    A client sends a prompt of ``known``, whose answer must be the one of an undisturbed run beside it, or a random one,
    which may be dropped midway and must otherwise be answered to its full length.

    Attributes:
        answered, dropped: requests.
        lost, wrong: a line for each request without an answer, and with a wrong one.
    """

    def __init__(
        self,
        servers: PDCluster,
        clients: int,
        known: Sequence[tuple[Sequence[int], Generation]] = (),
        *,
        random_share: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._url, self._known = servers.url + "/generate", known
        self._random_share, self._seed = random_share, seed
        self._leave, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(clients)
        ]
        self.answered = self.dropped = 0
        self.lost: list[str] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._leave.set()
        deadline = time.monotonic() + CLIENTS_LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if hung := sum(thread.is_alive() for thread in self._threads):
            self.lost.append(f"{hung} requests hang after {CLIENTS_LEAVE_S:.0f} s")

    def more_answered(self, count: int = 0) -> Callable[[], bool]:
        """A predicate: so many requests, or as many as clients, have been answered from now on."""
        enough = self.answered + (count or len(self._threads))
        return lambda: self.answered >= enough or bool(self.lost or self.wrong)

    def _client(self, number: int) -> None:
        chance = random.Random(self._seed << 8 | number)
        for turn in itertools.count(number):
            if self._leave.is_set():
                return
            if chance.random() >= self._random_share:
                prompt, answer = self._known[turn % len(self._known)]
                self._ask(prompt, len(answer.output_ids), expected=answer.output_ids)
            else:
                length, seed = chance.randrange(1, 1500), chance.randrange(1 << 30)
                [prompt] = random_prompts([length], seed=seed)
                keep = chance.randrange(8) if chance.random() < 0.15 else None
                self._ask(prompt, chance.randrange(1, 60), keep=keep)

    def _ask(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        expected: tuple[int, ...] | None = None,
        keep: int | None = None,
    ) -> None:
        """``keep``: events before the client drops the request."""
        ids: tuple[int, ...] = ()
        failure = ""
        payload = generate_payload(prompt, count, stream=True)
        try:
            with contextlib.closing(
                sse_events(self._url, payload, timeout_s=CLIENTS_LEAVE_S)
            ) as stream:
                for events, event in enumerate(stream):
                    ids = tuple(event.get("output_ids") or ids)
                    if events == keep:
                        break
        except NO_ANSWER as error:
            failure = f"{type(error).__name__}: {error}"
        about = f"request of {len(prompt)} + {count} tokens: {len(ids)} tokens {failure}"
        with self._lock:
            if failure or (keep is None and len(ids) != count):
                self.lost.append(about)
            elif keep is not None:
                self.dropped += 1
            else:
                self.answered += 1
                if expected not in (None, ids):
                    self.wrong.append(f"{about}, {ids}, expected {expected}")
