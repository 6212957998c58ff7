"""Which tokens each KV head keeps when they leave the window (Deng et al., Algorithm 1), and where.

Salience is a token's attention weight within the window, by a moving average. Kept tokens are contiguous per KV head,
in host memory that the CPU attends to. A context page holds S tokens of one head of one layer. A request has a list of
them for each layer and head; the last page may be partly filled. A list changes only at step boundaries, and grows only
past what running steps read; its pages are reused once no step that knew them can be running.

Shapes: L layers, C context pages of each, H KV heads, R pages of a list, S tokens of a page.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from sglang_scout.engine import RESULT_DELAY_STEPS, Ids, Ints
from sglang_scout.engine.stores import HostPages
from sglang_scout.ops.pages import copy_tokens, resident_slots
from sglang_scout.ops.residency import rank_within
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


def salient_bits(
    maw: Float32[Tensor, "L N W H S"],
    state: Int32[Tensor, " n"],
    at: Int32[Tensor, " n"],
    threshold: Float32[Tensor, "L N H"],
) -> Int32[Tensor, "L n H"]:
    """Bitmask of the tokens kept of pages that leave the window: those with MAW > threshold.

    Args:
        maw: see `decay_mass`.
        state, at: row and window index of each page in it; in range.
        threshold: beta / window of each request and head.
    Returns:
        [L, n, H] int32, bit t for token t.
    Source: Deng et al., section 3.2.2, Algorithm 1 line 24.
    """
    run = kernels.salient_bits if maw.is_cuda else salient_bits_reference
    return run(maw, state, at, threshold)


def salient_bits_reference(maw, state, at, threshold):
    keeps = maw[:, state, at] > threshold[:, state, :, None]  # [L, n, H, S]
    bit = 1 << torch.arange(maw.shape[-1], device=maw.device)
    return (keeps * bit).sum(-1).to(torch.int32)


def select_salient(
    q: Tensor, k: Tensor, pages: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Tokens of host pages whose softmax weight over all of these tokens exceeds beta / their number; on the host.

    Args:
        q: [HQ, D] float32, one request's query.
        k: [P, S, H, D] any float dtype.
        pages: [n] int64, its pages.
        beta: [H] float32.
    Returns:
        (heads [m], tokens [m]) int64 by head and then in the order of ``pages``; token t of page p is p S + t.
    Source: Deng et al., Algorithm 1 line 21; a token is kept if any query head of the group keeps it (ours).
    """
    _, S, H, D = k.shape
    q = q.view(H, -1, D)
    chunks = pages.split(256)  # bounds the widened copy: 32 MiB at H=8, D=128
    keys = (k.index_select(0, ids).flatten(0, 1).float() for ids in chunks)
    s = torch.cat([torch.einsum("hgd,thd->hgt", q, x) for x in keys], dim=2)
    weight = torch.softmax(s.mul_(scale), dim=2).amax(1)  # [H, n S]
    heads, at = (weight > beta[:, None] / max(1, weight.shape[1])).nonzero(as_tuple=True)
    return heads, pages[at // S] * S + at % S


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
