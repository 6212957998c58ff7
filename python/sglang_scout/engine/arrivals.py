"""Arriving requests, whose KV is here: their first pages are copied during running steps, then they join.

    arrival      the pages that the prefill server's hint names, or all of a prompt that the budget covers
    boundary t   starts the copies of the earliest ones, as many as should finish within step t
    boundary t+1 maps them; the requests join with this step

So no step waits for an arriving request. If no request is decoding, it joins at once and its boundary copies. Admission
depends only on numbers that tensor-parallel ranks share, so that they agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_scout.engine.hints import HINT_PAGES
from sglang_scout.engine.lifecycle import PageLifecycle
from sglang_scout.engine.placement import Placement

Pages = npt.NDArray[np.integer]


@dataclass
class Arrival:
    """A request that has not joined yet."""

    pages: Pages  # [L, n] first host pages, -1 padded
    generations: Pages  # [L, n] of them, on arrival
    is_covered: bool  # these are all its pages: it needs them in its first step
    max_copied: int  # pages, ignoring residency and hints, which may differ between ranks
    is_started: bool = False


class Arrivals:
    """The first pages of requests that are about to join; ``lifecycle`` knows which have changed owner since."""

    def __init__(self, placement: Placement, lifecycle: PageLifecycle) -> None:
        self._placement, self._lifecycle = placement, lifecycle
        self._waiting: dict[Hashable, Arrival] = {}  # in the order of the queue
        self._room = 0  # how many of them may join
        self._admitted: dict[int, Arrival | None] = {}  # by table row

    def add(self, request: Hashable, full_pages: Pages, hint: Pages | None) -> None:
        """The KV of a request has arrived.

        Args:
            request: its name.
            full_pages: ``[n]`` its full pages.
            hint: ``[L, k]`` positions among them, best first, -1 padded; None: no hint.
        """
        self._lifecycle.seal(full_pages)
        pages = self._placement.first_pages(full_pages)
        is_covered = pages.shape[1] == len(full_pages)
        if hint is not None and not pages.size:
            places = hint[:, : self._placement.budget_pages]
            pages = np.where(places >= 0, full_pages[places], -1)
        generations = self._lifecycle.generations(pages)
        max_copied = len(pages) * min(pages.shape[1], len(full_pages))
        self._waiting[request] = Arrival(pages, generations, is_covered, max_copied)

    def queue(self, requests: Iterable[Hashable], room: int) -> set[Hashable]:
        """All that wait to join, in order of arrival; ``room``: how many may join.

        Returns:
            Those whose copies have not started.
        """
        # The others were aborted, or ended with their first token.
        self._waiting = {name: self._waiting[name] for name in requests if name in self._waiting}
        self._room = room
        return {name for name, arrival in self._waiting.items() if not arrival.is_started}

    def start(self, step: int) -> None:
        """Boundary: start the copies of the earliest ones that have room, one hint's pages or a little more."""
        left = HINT_PAGES * self._placement.num_layers
        for arrival in itertools.islice(self._waiting.values(), self._room):
            if left <= 0:
                return
            if not arrival.is_started:
                arrival.is_started = True
                left -= arrival.max_copied
                self._placement.copy_beside(self._held(arrival), step)

    def admit(self, request: Hashable, row: int) -> None:
        """A request joins with the next step, in this table row."""
        self._admitted[row] = self._waiting.pop(request, None)

    def join(self, row: int, full_pages: Pages) -> Pages:
        """``[L, n]`` pages that have to be resident before the first step of the request in ``row``."""
        arrival = self._admitted.pop(row, None)
        if arrival is None:  # resumed after a retraction
            return self._placement.first_pages(full_pages)
        pages = self._held(arrival)
        return pages[:, :0] if arrival.is_started and not arrival.is_covered else pages

    def _held(self, arrival: Arrival) -> Pages:
        """Its pages, but -1 for those that were freed since its arrival."""
        is_held = self._lifecycle.generations(arrival.pages) == arrival.generations
        return np.where(is_held, arrival.pages, -1)
