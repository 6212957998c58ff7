"""Requests whose KV has come: their first pages are copied beside the steps of others, then they join.

    arrival      the pages that the prefill server's hint names, or all of a prompt that the budget covers
    boundary t   starts the copies of the request that came first; one a boundary, so that they end within step t
    boundary t+1 maps them; the request joins with this step

So no step waits for a newcomer. While nobody decodes there is nobody to wait: it joins at once, and its boundary
copies. When a request may join depends on the number of boundaries alone, so that tensor-parallel ranks agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_scout.engine.lifecycle import PageLifecycle
from sglang_scout.engine.placement import Placement

Pages = npt.NDArray[np.integer]


@dataclass
class Arrival:
    """A request that has not joined yet."""

    pages: Pages  # [L, n] host pages to begin with, -1 padded
    generations: Pages  # [L, n] of them, when it came
    is_started: bool = False


class Arrivals:
    """What requests that are about to join begin with, by table row.

    Args:
        placement: copies pages.
        lifecycle: knows which pages have changed hands since.
    """

    def __init__(self, placement: Placement, lifecycle: PageLifecycle) -> None:
        self._placement, self._lifecycle = placement, lifecycle
        self._waiting: dict[int, Arrival] = {}  # the order is that of arrival

    def add(self, row: int, full_pages: Pages, hint: Pages | None) -> None:
        """The KV of a request has come.

        Args:
            full_pages: ``[n]`` its full pages.
            hint: ``[L, k]`` places among them, best first, -1 padded; None: there is none.
        """
        pages = self._placement.first_pages(full_pages)
        if hint is not None and not pages.size:
            places = hint[:, : self._placement.budget_pages]
            pages = np.where(places >= 0, full_pages[places], -1)
        self._waiting.pop(row, None)  # of one that was aborted
        self._waiting[row] = Arrival(pages, self._lifecycle.generations(pages))

    def waits(self, row: int) -> bool:
        """Whether copies for the request in ``row`` have still to begin."""
        arrival = self._waiting.get(row)
        return arrival is not None and not arrival.is_started

    def start(self, step: int) -> None:
        """Boundary: begin to copy for the request that has waited longest."""
        for arrival in self._waiting.values():
            if not arrival.is_started:
                arrival.is_started = True
                self._placement.copy_beside(self._held(arrival), step)
                return

    def join(self, row: int, full_pages: Pages) -> Pages:
        """``[L, n]`` pages that have to be copied before the first step of the request in ``row``."""
        arrival = self._waiting.pop(row, None)
        if arrival is None:  # it comes back after a retraction
            return self._placement.first_pages(full_pages)
        return self._held(arrival)[:, : 0 if arrival.is_started else None]

    def _held(self, arrival: Arrival) -> Pages:
        """Its pages, but -1 for those of a request that was aborted."""
        is_held = self._lifecycle.generations(arrival.pages) == arrival.generations
        return np.where(is_held, arrival.pages, -1)
