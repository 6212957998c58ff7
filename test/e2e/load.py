"""Clients of a pair of servers, and the outcomes of their requests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException

from harness import PDCluster, random_prompts
from servers.sglang_http import Generation, RequestFailed, generate_payload, sse_events

CLIENTS_LEAVE_S = 120.0  # for a client's last request at the end
_SHARED_TOKENS = 320


class Load:
    """Clients that send one streamed request after the other. ``with`` starts them; at its end they stop.

    A client sends a known prompt, whose answer must be the known one, or a random one, which may be dropped midway and
    must otherwise be answered to its full length.

    Args:
        known: an undisturbed run's answers to ``prompts``; a client starts with that of its number.
        random_share: of requests with a random prompt.
        seed: of the random choices.
        priorities: requests carry one.

    Attributes:
        answered, dropped: requests.
        lost, wrong: a line for each request without an answer, and with a wrong one.
        longest_stall_s: longest time without a token of a request that had some already.
    """

    def __init__(
        self,
        servers: PDCluster,
        clients: int,
        *,
        prompts: Sequence[Sequence[int]] = (),
        known: Sequence[Generation] = (),
        random_share: float = 0.0,
        seed: int = 0,
        priorities: bool = False,
    ) -> None:
        self._url = servers.url + "/generate"
        self._known = list(zip(prompts, known, strict=True))
        self._random_share, self._seed, self._priorities = random_share, seed, priorities
        [self._shared] = random_prompts([_SHARED_TOKENS], seed=seed)
        self._leave = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(clients)
        ]
        self.answered = self.dropped = 0
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self.longest_stall_s = 0.0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._leave.set()
        deadline = time.monotonic() + CLIENTS_LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = sum(thread.is_alive() for thread in self._threads)
        if hung:
            self.lost.append(f"{hung} requests hang after {CLIENTS_LEAVE_S:.0f} s")

    def all_asked_again(self) -> Callable[[], bool]:
        """A predicate: as many requests as clients have been answered from now on."""
        enough = self.answered + len(self._threads)
        return lambda: self.answered >= enough or bool(self.lost or self.wrong)

    def _client(self, number: int) -> None:
        chance = random.Random(self._seed << 8 | number)
        turn = number
        while not self._leave.is_set():
            keep = None  # events before the client drops the request
            if self._known and chance.random() >= self._random_share:
                prompt, answer = self._known[turn % len(self._known)]
                expected, count = answer.output_ids, len(answer.output_ids)
                turn += 1
            else:
                longest = chance.choice((64, 900, 2500))
                [prompt] = random_prompts(
                    [chance.randrange(1, longest)], seed=chance.randrange(1 << 30)
                )
                if chance.random() < 0.3:
                    prompt = self._shared + prompt
                expected, count = None, chance.randrange(1, 120)
                keep = chance.randrange(8) if chance.random() < 0.15 else None
            priority = {"priority": chance.randrange(3)} if self._priorities else {}
            self._ask(prompt, count, expected, keep, priority)

    def _ask(
        self,
        prompt: Sequence[int],
        count: int,
        expected: tuple[int, ...] | None,
        keep: int | None,
        more: dict[str, int],
    ) -> None:
        payload = generate_payload(prompt, count, stream=True) | more
        ids: tuple[int, ...] = ()
        stall_s, last_s, failure = 0.0, None, ""
        stream = sse_events(self._url, payload, timeout_s=CLIENTS_LEAVE_S)
        try:
            for events, event in enumerate(stream, 1):
                now_s = time.monotonic()
                stall_s = max(stall_s, now_s - (last_s or now_s))
                last_s, ids = now_s, tuple(event.get("output_ids") or ids)
                if keep is not None and events > keep:
                    break
        except (RequestFailed, HTTPException, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator
        about = f"request of {len(prompt)} + {count} tokens"
        with self._lock:
            self.longest_stall_s = max(self.longest_stall_s, stall_s)
            if failure or (keep is None and len(ids) != count):
                self.lost.append(f"{about}: {len(ids)} tokens {failure}")
            elif keep is not None:
                self.dropped += 1
            else:
                self.answered += 1
                if expected not in (None, ids):
                    at = next(
                        i for i, (a, b) in enumerate(zip(expected, ids, strict=True)) if a != b
                    )
                    self.wrong.append(f"{about}: other tokens from position {at} on")
