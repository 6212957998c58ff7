"""Requests of a decode server, from the arrival of their KV to their end.

    arrival      the pages that the prefill server's hint names, or all of a prompt that the budget covers
    boundary t   starts the copies of the earliest ones, as many as should finish within step t
    boundary t+1 maps them; the requests join with this step

So no step waits for an arriving request. If no request is decoding, it joins at once and its boundary copies. Admission
depends only on numbers that tensor-parallel ranks share, so that they agree.

A hint has the pages that are important to a prompt's last token. It only controls prefetching, never what is attended
to: a wrong or missing one costs time, not accuracy.

    prefill      the token's real queries  ->  scores of the prompt's digests  ->  the best pages of each layer
    transfer     their positions in the prompt, in the row of the prompt's last page, after its digests

To a policy without digests the hint is these queries themselves.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.engine import Ids, Ints, PageIds
from sglang_scout.engine.device import upload
from sglang_scout.engine.digests import DigestKind, DigestPool
from sglang_scout.engine.pages import Pages
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.step_buffers import Candidates
from sglang_scout.engine.stores import ModelShape, Parts
from sglang_scout.ops.select import select_pages

HINT_PAGES = 64
"""Pages per layer in a hint, best first. Independent of the budget, which the prefill server need not know."""

_MAX_HINT_PAGES = 2**16 - 2  # of a prompt: a position takes 16 bits


class PageHints:
    """For every page, the hint of the prompt that ends in it, on the host: 128 bytes per layer. Requests that share a
    page share the prompt up to it, and so the hint.

    Attributes:
        parts: ``[L, P, k / 2]`` int16 each, two as the transfer needs: position + 1 in the prompt, 0: none.
        made: how many hints were stored.
    """

    def __init__(self, shape: ModelShape, num_pages: int) -> None:
        self._shape = shape
        size = shape.num_layers, num_pages, self.words(shape) // 2
        self._rows = [np.zeros(size, np.uint16) for _ in range(2)]
        self.made = 0
        self.parts = tuple(torch.from_numpy(rows.view(np.int16)) for rows in self._rows)

    @staticmethod
    def words(shape: ModelShape) -> int:
        """Of 16 bits, of a page and layer."""
        return HINT_PAGES

    def clear(self, pages: PageIds) -> None:
        """``pages`` have new owners."""
        for rows in self._rows:
            rows[:, pages, 0] = 0

    def put(self, page: int, hint: npt.NDArray[Any]) -> None:
        """Store the hint ``[L, k]``, -1 padded, of a prompt whose last page is ``page``."""
        self._write(page, hint + 1)

    def _write(self, page: int, words: npt.NDArray[Any]) -> None:
        self.made += 1
        for rows, part in zip(self._rows, np.split(words, 2, axis=1), strict=True):
            rows[:, page] = part

    def of(self, page: int, n_full: int) -> Ids | Tensor | None:
        """``[L, k]`` positions among the ``n_full`` full pages of the prompt that ends in ``page``, -1 padded; or
        None."""
        places = np.concatenate([rows[:, page] for rows in self._rows], axis=1).astype(np.int64) - 1
        places[(places[:, :1] < 0) | (places >= n_full)] = -1  # without a first one: none
        return places if (places >= 0).any() else None


class QueryHints(PageHints):
    """The queries themselves, as fp16, behind a word in each part that says that they are there."""

    @staticmethod
    def words(shape: ModelShape) -> int:
        return shape.num_q_heads * shape.head_dim + 2

    def put(self, page: int, hint: npt.NDArray[Any]) -> None:
        """Store ``[L, HQ, D]``."""
        most = np.finfo(np.float16).max
        halves = hint.clip(-most, most).astype(np.float16).reshape(len(hint), 2, -1)
        words = np.pad(halves.view(np.uint16), ((0, 0), (0, 0), (1, 0)), constant_values=1)
        self._write(page, words.reshape(len(words), -1))

    def of(self, page: int, n_full: int) -> Tensor | None:
        """``[L, HQ, D]`` fp32, or None."""
        words = np.stack([rows[:, page] for rows in self._rows], axis=1)
        queries = torch.from_numpy(words[..., 1:].copy().view(np.float16)).float()
        found = queries.view(-1, self._shape.num_q_heads, self._shape.head_dim)
        return found if words[..., 0].all() else None


def hints_of(rule: SelectionRule) -> type[PageHints] | None:
    """The kind of hints, on either server; None where KV heads select pages, which hints of a layer do not name."""
    if rule.digest is DigestKind:  # which selects nothing
        return QueryHints
    return None if rule.by_head else PageHints


def hint_bytes(rule: SelectionRule, shape: ModelShape) -> int:
    """Bytes per page."""
    kind = hints_of(rule)
    return 2 * kind.words(shape) * shape.num_layers if kind else 0


def has_hint(address: int, row_bytes: int, page: int) -> bool:
    """Whether ``page`` has a hint, by the first layer of the first part at ``address``."""
    return ctypes.c_uint16.from_address(address + page * row_bytes).value > 0


def choose_hint(
    digests: DigestPool, queries: Tensor, pages: PageIds, rule: SelectionRule, scale: float
) -> npt.NDArray[Any] | None:
    """``[L, k]`` positions of the pages that a decode step with these ``queries`` would select, by this rank's heads;
    or ``queries`` if there are no digests.

    Args:
        digests: valid ones, of ``pages`` ``[N]``, the prompt's full pages.
        queries: ``[L, HQ, D]`` fp32 real queries of its last token, after RoPE.
    Returns:
        None for a prompt without a full page, or too long for 16 bits.
    """
    if hints_of(rule) is QueryHints:
        return queries.cpu().numpy()
    if not 0 < len(pages) <= _MAX_HINT_PAGES:
        return None
    layers, device = len(queries), digests.device
    table = upload(np.ascontiguousarray(pages[None], np.int32), device)
    n_full = torch.full((layers,), len(pages), dtype=torch.int32, device=device)
    candidates = Candidates.of(table, n_full[:1], 1)
    scores = [
        digests.score(layer, queries[layer : layer + 1], candidates, scale)
        for layer in range(layers)
    ]
    places = torch.arange(len(pages), dtype=torch.int32, device=device)
    of_layers = torch.cat(scores), places.repeat(layers, 1), n_full, torch.zeros_like(places)
    chosen = select_pages(*of_layers, HINT_PAGES, rule.sink_pages, rule.recent_pages)
    return chosen.pages.cpu().numpy()


@dataclass(eq=False)
class Request:
    """A request, from its arrival to its end."""

    arrived_s: float | None = None  # None: after a retraction
    first_pages: PageIds | None = None  # [L, n] to load, -1 padded; None: after a retraction
    generations: PageIds | None = None  # [L, n] of them, on arrival
    is_covered: bool = False  # these are all its pages: it needs them in its first step
    is_started: bool = False  # their copies have started, before it joined
    end_tokens: int = 0  # length that it may reach
    first_step: int = 0  # the step it joined with, 0: has not yet
    full_pages: int = 0  # how many it had at its last boundary
    queries: Tensor | None = None  # [L, HQ, D] of the prompt's last token, if the hint has them


@dataclass
class Batch:
    """A step's requests and its inputs on the host; N = pages of the longest request."""

    requests: list[Request]  # B
    table: Ints  # [B, N] host page ids, -1 beyond the last page
    n_full: Ints  # [B] full pages, candidates for selection
    tail_slot: Ints  # [L, B] slot of the page being filled
    tail_len: Ints  # [B] valid tokens in it, this step's included
    tail_page: Ints  # [B] host page id of it
    ages: Ids  # [B] steps of each request here before this one
    is_dense: bool = False  # all pages are resident, and attended to


class Requests:
    """Requests that wait to join, and those of the batch; ``pages`` knows which pages have changed owner since."""

    def __init__(self, parts: Parts, pages: Pages) -> None:
        self._pages, self._budget_pages = pages, parts.sizes.budget_pages
        self._counters = parts.counters
        self._hint_pages = HINT_PAGES * parts.shape.num_layers
        self._waiting: dict[Hashable, Request] = {}  # in the order of the queue
        self._room = 0  # how many of them may join
        self._of_row: dict[int, Request] = {}

    def arrive(self, name: Hashable, full_pages: PageIds, hint: PageIds | Tensor | None) -> None:
        """The KV of a request has arrived, with ``full_pages`` ``[n]``; ``hint``, if any, has positions ``[L, k]``
        among them, best first, -1 padded, or queries, a tensor ``[L, HQ, D]``."""
        now_s = time.monotonic()
        self._pages.seal(full_pages)
        first = self._pages.first_pages(full_pages)
        is_covered = first.shape[1] == len(full_pages)
        queries = hint if isinstance(hint, Tensor) else None
        if hint is not None and queries is None and not first.size:
            places = hint[:, : self._budget_pages]
            first = np.where(places >= 0, full_pages[places], -1)
        generations = self._pages.generations(first)
        self._waiting[name] = Request(now_s, first, generations, is_covered, queries=queries)

    def queue(self, names: Iterable[Hashable], room: int) -> set[Hashable]:
        """All that wait to join, in order of arrival; ``room``: how many may join. Returns those whose copies have not
        started."""
        # The others were aborted, or ended with their first token.
        self._waiting = {name: self._waiting[name] for name in names if name in self._waiting}
        self._room = room
        return {name for name, request in self._waiting.items() if not request.is_started}

    def admit(self, name: Hashable, row: int, end_tokens: int) -> None:
        """A request, new or after a retraction, joins with the next step, in this row of SGLang's request table."""
        self._of_row[row] = request = self._waiting.pop(name, None) or Request()
        request.end_tokens = end_tokens
        if request.arrived_s is not None:
            self._counters.observe(admission_delay_seconds=time.monotonic() - request.arrived_s)

    def of_rows(self, rows: Sequence[int], step: int) -> list[Request]:
        """The requests in these table rows; those that join do so with ``step``."""
        found = [self._of_row.setdefault(row, Request()) for row in rows]
        for request in found:
            request.first_step = request.first_step or step
        return found

    def start_copies(self) -> None:
        """Boundary: for the earliest ones that have room, one hint's pages or a little more."""
        left = self._hint_pages
        for request in itertools.islice(self._waiting.values(), self._room):
            if left <= 0:
                return
            if not request.is_started:
                request.is_started = True
                held = self._held(request)
                left -= held.size  # with -1, as ranks differ in residency and must agree
                self._pages.copy_beside(held)

    def needed(self, request: Request, full_pages: PageIds) -> PageIds:
        """``[L, n]`` pages that have to be resident before the first step of ``request``."""
        if request.first_pages is None:
            return self._pages.first_pages(full_pages)
        held = self._held(request)
        request.first_pages = request.generations = None  # from now on policies decide
        return held[:, :0] if request.is_started and not request.is_covered else held

    def _held(self, request: Request) -> PageIds:
        """Its first pages, but -1 for those that were freed since its arrival."""
        assert request.first_pages is not None
        is_held = self._pages.generations(request.first_pages) == request.generations
        return np.where(is_held, request.first_pages, -1)
