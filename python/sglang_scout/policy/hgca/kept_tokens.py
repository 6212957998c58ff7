"""Which tokens each KV head keeps when they leave the window (Deng et al., Algorithm 1), and where.

A token's *salience* is its attention weight in multiples of the mean weight of the tokens among which that was
normalised: weight x number of tokens. So weights from the window (a moving average) and from an evaluation of older
tokens are on one scale, that of beta: both of the paper's thresholds are salience > beta.

Kept tokens are contiguous per KV head, in host memory that the CPU attends to. A context page holds S tokens of one
head of one layer. A request has a list of them for each layer and head; the last page may be partly filled. A list
changes only at step boundaries, and grows only past what running steps read; a page in which tokens give way to more
salient ones is written anew. Pages are reused once no step that knew them can be running.

Shapes: L layers, C context pages of each, H KV heads, R pages of a list, S tokens of a page.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.pages import copy_tokens, resident_slots
from sglang_scout.ops.triton import Lazy

kernels = Lazy(f"{__package__}.kernels")


def decay_mass(
    q: Float[Tensor, "B HQ D"],
    lse: Float32[Tensor, "B HQ"],
    k: Float[Tensor, "P S H D"],
    pages: Int32[Tensor, "B N"],
    n_pages: Int32[Tensor, " B"],
    slot_of: Int32[Tensor, " I"],
    last_page: Int32[Tensor, " B"],
    last_len: Int32[Tensor, " B"],
    first_at: Int32[Tensor, " B"],
    state: Int32[Tensor, " B"],
    fresh: Int32[Tensor, " B"],
    maw: Float32[Tensor, "M W H S"],
    alpha: float,
    scale: float,
) -> None:
    """Update the moving average of every token's attention weight: MAW = (1 - alpha) MAW + alpha A.

    A = e^(s - lse) is normalised within the window; a KV head's is the maximum over its query heads. The average begins
    with the first weight: of the newest token, and of all tokens in a request's first step.

    Args:
        q, lse: the query, and the lse of its attention over the window.
        k: the resident slots.
        pages, n_pages: the window's full pages, oldest first, fewer than W per row.
        slot_of: the slot of each page.
        last_page, last_len: slot of the partially filled (newest) page and its number of tokens, 1..S.
        first_at: index of the oldest page in ``maw``, a ring buffer of W pages.
        state: row of ``maw``, distinct; negative: none, nothing is written.
        fresh: nonzero in a request's first step.
        maw: mutated where there is a token.
    Source: Deng et al., Algorithm 1 line 9 with A of Algorithm 2 line 11; the maximum over a group: ours.
    """
    run = kernels.decay_mass if q.is_cuda else decay_mass_reference
    of_window = pages, n_pages, slot_of, last_page, last_len, first_at
    run(q, lse, k, *of_window, state, fresh, maw, alpha, scale)


def decay_mass_reference(q, lse, k, pages, n_pages, slot_of, *of_rows):
    last_page, last_len, first_at, state, fresh, maw, alpha, scale = of_rows
    (B, N), (S, H, D), W = pages.shape, k.shape[1:], maw.shape[1]
    column = torch.arange(W, device=q.device)
    listed = torch.nn.functional.pad(pages[:, :W], (0, max(0, W - N)), value=-1)
    slots = resident_slots(slot_of, listed.masked_fill(column >= n_pages[:, None], -1))
    is_last = column == n_pages[:, None]  # [B, W]
    slots = torch.where(is_last, last_page[:, None], slots)
    lengths = torch.where(is_last, last_len[:, None], S).masked_fill(slots < 0, 0)
    keys = k.index_select(0, slots.clamp(min=0).flatten()).view(B, W * S, H, D).float()
    s = torch.einsum("bhgd,bthd->bhgt", q.float().view(B, H, -1, D), keys) * scale
    weight = torch.exp(s - lse.view(B, H, -1, 1)).amax(2).view(B, H, W, S).transpose(1, 2)
    token = torch.arange(S, device=q.device)
    newest = is_last[..., None] & (token == last_len[:, None, None] - 1)  # [B, W, S]
    starts = newest | (fresh != 0)[:, None, None]
    row, place = (state.long()[:, None], (first_at[:, None] + column) % W)
    old = maw[row.clamp(min=0), place]
    moved = torch.where(starts[:, :, None], weight, (1 - alpha) * old + alpha * weight)
    there = (token < lengths[..., None])[:, :, None]
    live = (state >= 0).nonzero().squeeze(1)
    maw[row[live], place[live]] = torch.where(there, moved, old)[live]


def select_salient(
    q: Tensor, k: Tensor, pages: Tensor, beta: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of host pages with salience > beta among all tokens of these; on the host.

    Args:
        q: [HQ, D] float32, one request's query.
        k: [P, S, H, D] any float dtype.
        pages: [n] int64, its pages.
    Returns:
        (heads [m], tokens [m], salience [m]) int64, int64, float32 by head and then in the order of ``pages``; token t
        of page p is p S + t.
    Source: Deng et al., Algorithm 1 line 21; a KV head's weight is the largest of its group's query heads (ours).
    """
    _, S, H, D = k.shape
    q = q.view(H, -1, D)
    chunks = pages.split(256)  # bounds the widened copy: 32 MiB at H=8, D=128
    keys = (k.index_select(0, ids).flatten(0, 1).float() for ids in chunks)
    s = torch.cat([torch.einsum("hgd,thd->hgt", q, x) for x in keys], dim=2)
    salience = torch.softmax(s.mul_(scale), dim=2).amax(1).mul_(s.shape[2])  # [H, n S]
    heads, at = (salience > beta).nonzero(as_tuple=True)
    return heads, pages[at // S] * S + at % S, salience[heads, at]


def _by_list(lists: Ids, salience: npt.NDArray[np.float32]) -> Ids:
    """Order by list, most salient first. Bits of floats that are not negative are in the order of their values."""
    return np.argsort((lists << 32) - salience.view(np.int32))


def _rank_within(lists: Ids) -> Ids:
    """The index of each element among those of its list; ``lists`` are ascending."""
    count = np.bincount(lists)
    return np.arange(len(lists)) - (np.cumsum(count) - count)[lists]


@dataclass(frozen=True)
class Kept:
    """What is kept of one request."""

    pages: Ints  # [L, H, R] context pages, -1 after the last
    tokens: Ids  # [L, H]


class ContextCache:
    """The pool and its lists.

    Args:
        host: pages that tokens are copied from; has context pages.
        cap_tokens: most tokens of a list; None: as many as R pages hold.
    """

    def __init__(self, host: HostPages, row_pages: int, cap_tokens: int | None) -> None:
        assert host.context is not None
        self._source, self._pool = host.for_copies(torch.device("cpu")), host.context
        self._page_tokens, heads = host.k[0].shape[1:3]
        layers, count = len(host.k), len(host.context.k[0])
        self._lists = layers, heads, row_pages
        self._cap_tokens = min(cap_tokens or 2**31, row_pages * self._page_tokens)
        self._first_id = host.num_pages
        self._free = np.tile(np.arange(count, dtype=np.int32), (layers, 1))  # [L, C], stacks
        self._num_free, self.num_pages = np.full(layers, count), layers * count
        self._spare = count // 16  # of each layer, for lists that exchange tokens
        places = layers, count, self._page_tokens
        self._token, self._salience = np.zeros(places, np.int32), np.zeros(places, np.float32)
        self._lock = threading.Lock()  # of these: tokens may be added by another thread
        # Layers and pages released at each of the last boundaries: steps that may still run read them.
        self._released: deque[list[tuple[Ids, Ints]]] = deque()

    @property
    def used_pages(self) -> int:
        """Context pages in use, of all layers, out of ``num_pages``."""
        return int(self.num_pages - self._num_free.sum())

    def empty(self) -> Kept:
        """A request without kept tokens."""
        return Kept(np.full(self._lists, -1, np.int32), np.zeros(self._lists[:2], np.int64))

    def add(
        self, kept: Kept, layers: Ids, heads: Ids, tokens: Ids, salience: npt.NDArray[np.float32]
    ) -> None:
        """Add K and V of tokens to a request's lists, all ``[m]``; token t of host page p is p S + t.

        A list that is at the cap, or finds no page, exchanges its least salient tokens for more salient ones. Tokens
        are dropped regardless of salience only if the pool lacks the pages for that, too.
        """
        lists = layers * self._lists[1] + heads
        order = _by_list(lists, salience)
        ordered = lists[order], tokens[order], salience[order]
        left = self._append(kept, *ordered)
        if left.any():
            self._exchange(kept, *(x[left] for x in ordered))

    def _append(self, kept: Kept, lists: Ids, tokens: Ids, salience: Any) -> Any:
        """Append ordered tokens. Returns ``[m]`` which have no room."""
        (_, num_heads, row_pages), size = self._lists, self._page_tokens
        pages, counts = kept.pages.reshape(-1, row_pages), kept.tokens.reshape(-1)
        place = counts[lists] + _rank_within(lists)
        column, fits = place // size, place < self._cap_tokens
        begins = np.flatnonzero(fits & (place % size == 0))
        # If pages are short, all lists get one before any gets two.
        begins = begins[np.lexsort((column[begins], lists[begins] // num_heads))]
        pages[lists[begins], column[begins]] = self._take(lists[begins] // num_heads, self._spare)
        fits &= pages[lists, np.minimum(column, row_pages - 1)] >= 0
        self._write(kept, *(x[fits] for x in (lists, place, tokens, salience)))
        counts += np.bincount(lists[fits], minlength=len(counts))
        return ~fits

    def _exchange(self, kept: Kept, lists: Ids, tokens: Ids, salience: Any) -> None:
        """Ordered tokens for which their lists have no room take the places of less salient ones. Running steps read
        these, so a page that changes is written anew, as long as there are free ones."""
        _, heads, row_pages = self._lists
        counts, pages = kept.tokens.reshape(-1), kept.pages.reshape(-1)
        owner, place, *held = self._entries(kept, np.unique(lists))
        least = np.full(len(counts), np.inf, np.float32)  # stays of lists without a page
        np.minimum.at(least, owner, held[1])
        better = salience > least[lists]
        if not better.any():
            return
        news = lists[better], tokens[better], salience[better]
        every, tokens, salience = map(np.concatenate, zip((owner, *held), news, strict=True))
        order = _by_list(every, salience)
        is_out = _rank_within(every[order]) >= counts[every[order]]
        lose, win = order[is_out], order[~is_out]
        lose, win = lose[lose < len(owner)], win[win >= len(owner)]  # as many of each list
        tokens[lose], salience[lose] = tokens[win], salience[win]
        at = owner * row_pages + place // self._page_tokens
        changed = np.unique(at[lose])
        taken = self._take(changed // row_pages // heads)
        changed, taken = changed[taken >= 0], taken[taken >= 0]
        with self._lock:
            self._released[-1].append((changed // row_pages // heads, pages[changed]))
        pages[changed] = taken
        is_new = np.isin(at, changed)
        of_pages = tokens[: len(at)], salience[: len(at)]
        self._write(kept, *(x[is_new] for x in (owner, place, *of_pages)))

    def _take(self, layers: Ids, spare: int = 0) -> Ints:
        """``[n]`` free pages of ascending ``layers``, all but the last ``spare`` of each; -1 where none is left."""
        taken = np.full(len(layers), -1, np.int32)
        with self._lock:
            rank = _rank_within(layers)
            has = rank < self._num_free[layers] - spare
            taken[has] = self._free[layers[has], (self._num_free[layers] - 1 - rank)[has]]
            self._num_free -= np.bincount(layers[has], minlength=len(self._free))
        return taken

    def _write(self, kept: Kept, lists: Ids, place: Ids, tokens: Ids, salience: Any) -> None:
        """Copy tokens to their places in lists."""
        heads, size = self._lists[1], self._page_tokens
        at = self._at(kept, lists, place)
        ids = np.stack(
            [at[0], tokens * heads + lists % heads, at[1].astype(np.int64) * size + at[2]]
        )
        copy_tokens(self._source, torch.from_numpy(ids), self._pool)
        self._token[at], self._salience[at] = tokens, salience

    def _at(self, kept: Kept, lists: Ids, place: Ids) -> tuple[Ids, Ints, Ids]:
        """Layers, pages, and places in these."""
        column, at = np.divmod(place, self._page_tokens)
        return lists // self._lists[1], kept.pages.reshape(-1, self._lists[2])[lists, column], at

    def _entries(self, kept: Kept, lists: Ids) -> Any:
        """What ``lists`` hold: of each token the list, its place in it, the token and its salience."""
        owner = np.repeat(lists, kept.tokens.reshape(-1)[lists])
        place = _rank_within(owner)
        at = self._at(kept, owner, place)
        return owner, place, self._token[at].astype(np.int64), self._salience[at]

    def worker_ids(self, kept: Kept) -> tuple[Ints, Ints]:
        """``[L, H, R]`` ids as the ring takes them and ``[L, H]`` how many of each list.

        Beyond the P host pages, P + c S + n - 1 is the first n tokens of context page c.
        """
        size = self._page_tokens
        counts = kept.tokens[..., None] - size * np.arange(kept.pages.shape[2])
        ids = self._first_id + kept.pages * size + counts.clip(1, size) - 1
        n_pages = -(-kept.tokens // size)
        return np.where(kept.pages < 0, -1, ids).astype(np.int32), n_pages.astype(np.int32)

    def release(self, kept: Kept) -> None:
        """A request has ended, or was retracted."""
        is_page = kept.pages >= 0
        with self._lock:
            self._released[-1].append((is_page.nonzero()[0], kept.pages[is_page]))

    def begin_step(self) -> None:
        """Step boundary: pages released ``RESULT_DELAY_STEPS`` boundaries ago become free."""
        with self._lock:
            is_old = len(self._released) == RESULT_DELAY_STEPS
            for layers, pages in self._released.popleft() if is_old else ():
                self._free[layers, self._num_free[layers] + _rank_within(layers)] = pages
                self._num_free += np.bincount(layers, minlength=len(self._free))
            self._released.append([])
