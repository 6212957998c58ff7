"""Kept tokens of older pages, contiguous per KV head, in host memory that the CPU attends to.

A context page holds S tokens of one head of one layer. A request has a list of them for each layer and head; the last
page may be partly filled. A list changes only at step boundaries, and grows only past what running steps read; its
pages are reused once no step that knew them can be running.

Shapes: L layers, C context pages of each, H KV heads, R pages of a list, S tokens of a page.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.pages import copy_tokens
from sglang_scout.ops.residency import rank_within


@dataclass(frozen=True)
class Kept:
    """What is kept of one request."""

    pages: npt.NDArray[np.int32]  # [L, H, R] context pages, -1 after the last
    tokens: Ids  # [L, H]


class ContextCache:
    """The pool and its lists.

    Args:
        host: pages that tokens are copied from; has context pages.
        row_pages: R.
        cap_tokens: most tokens of a list; None: as many as R pages hold.
    """

    def __init__(self, host: HostPages, row_pages: int, cap_tokens: int | None) -> None:
        if host.context is None:
            raise ValueError("the host pages have no context pages, which the policy needs")
        self._source, self._pool = host.for_copies(torch.device("cpu")), host.context
        self._page_tokens, heads = host.k[0].shape[1:3]
        layers, count = len(host.k), len(host.context.k[0])
        self._lists = layers, heads, row_pages
        self._cap_tokens = min(cap_tokens or 2**31, row_pages * self._page_tokens)
        self._first_id = host.num_pages
        self._free = np.tile(np.arange(count, dtype=np.int32), (layers, 1))  # [L, C], stacks
        self._num_free, self.num_pages = np.full(layers, count), layers * count
        self._lock = threading.Lock()  # of both: tokens may be added by another thread
        # Released at each of the last boundaries: steps that may still run read it.
        self._released: deque[list[Kept]] = deque()

    @property
    def used_pages(self) -> int:
        """Context pages in use, of all layers, out of ``num_pages``."""
        return int(self.num_pages - self._num_free.sum())

    def empty(self) -> Kept:
        """A request without kept tokens."""
        return Kept(np.full(self._lists, -1, np.int32), np.zeros(self._lists[:2], np.int64))

    def add(self, kept: Kept, layers: Ids, heads: Ids, tokens: Ids) -> npt.NDArray[np.bool_]:
        """Append K and V of tokens to a request's lists.

        Args:
            layers, heads, tokens: ``[m]``, by layer and then head; token t of host page p is p S + t.
        Returns:
            ``[L, H]`` lists that were full, or found no page: the rest of their tokens is dropped.
        """
        num_layers, num_heads, _ = self._lists
        size, lists = self._page_tokens, layers * num_heads + heads
        place = kept.tokens[layers, heads] + rank_within(lists)
        fits = place < self._cap_tokens
        begins = np.flatnonzero(fits & (place % size == 0))
        with self._lock:
            rank = rank_within(layers[begins])
            begins, rank = (x[rank < self._num_free[layers[begins]]] for x in (begins, rank))
            of = layers[begins]
            taken = self._free[of, self._num_free[of] - 1 - rank]
            self._num_free -= np.bincount(of, minlength=num_layers)
        kept.pages[of, heads[begins], place[begins] // size] = taken
        column = np.minimum(place // size, kept.pages.shape[2] - 1)
        page = kept.pages[layers, heads, column].astype(np.int64)
        fits &= page >= 0
        rows = tokens * num_heads + heads
        ids = np.stack([layers, rows, page * size + place % size])[:, fits]
        copy_tokens(self._source, torch.from_numpy(np.ascontiguousarray(ids)), self._pool)
        both = (np.bincount(x, minlength=num_layers * num_heads) for x in (lists[fits], lists))
        added, given = (x.reshape(num_layers, num_heads) for x in both)
        kept.tokens[:] += added
        return added < given

    def worker_ids(self, kept: Kept) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """``[L, H, R]`` ids as the ring takes them and ``[L, H]`` how many of each list.

        Beyond the P host pages, P + c S + n - 1 is the first n tokens of context page c.
        """
        size = self._page_tokens
        counts = kept.tokens[..., None] - size * np.arange(kept.pages.shape[2])
        ids = self._first_id + kept.pages * size + counts.clip(1, size) - 1
        n_pages = -(-kept.tokens // size)
        return np.where(kept.pages < 0, -1, ids).astype(np.int32), n_pages.astype(np.int32)

    def release(self, kept: Kept) -> None:
        """A request has ended, was retracted or is being re-evaluated."""
        self._released[-1].append(kept)

    def begin_step(self) -> None:
        """Step boundary: pages released ``RESULT_DELAY_STEPS`` boundaries ago become free."""
        for kept in self._released.popleft() if len(self._released) == RESULT_DELAY_STEPS else ():
            with self._lock:
                for layer, pages in enumerate(kept.pages):
                    pages = pages[pages >= 0]
                    end = self._num_free[layer] + len(pages)
                    self._free[layer, self._num_free[layer] : end] = pages
                    self._num_free[layer] = end
        self._released.append([])
