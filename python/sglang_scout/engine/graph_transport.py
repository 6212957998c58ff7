"""Route ``cpu`` from a device's stream: the request ring in pinned host memory, driven by kernels (paper Algorithm 1,
lines 7 and 12).

The device-side counterpart of `worker.client`, for steps that run as a CUDA graph: no host round trip. The oracle is
the C++ producer: a post must leave the same bytes in the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sglang_scout.engine.transport import Attended, Transport
from sglang_scout.ops import triton as kernels

ERRORS = {1: "no answer in time", 2: "CPU attention refused a record", 4: "a slot was not answered"}


def texts(bits: int) -> list[str]:
    return [text for bit, text in ERRORS.items() if bits & bit]


class GraphTransport(Transport):
    """The ring's producer on a device's current stream.

    Posts are ordered with each other, and so are merges; a layer is merged after its post, possibly concurrently with
    the post of another. A step posts at most once per layer. A capture bakes nothing in: number, epoch and step live in
    device memory. While the epoch is 0, as in warm-up and capture, nothing is posted.

    Args:
        arena: with the ring, at an address that is the device's too.
        epoch: of the attention process for records of the next step; never 0.
        split: how many splits each row's pages have, a `worker.ring.Split`.
        timeout_us: how long a merge waits for CPU attention, above 0.
        faults: [R] int64 in host memory that the device can write to, one word for each of R ranks that step together.
            None: one word, allocated here.
        rank: index of the word that this ring writes.

    Attributes:
        epoch: of the records that are posted now.
        state: [4] int64: epoch, step, number of the last post, error bits.
        open_seq: [2 L] int64, in-flight records (no answer yet).
        fault: [1] int64, this rank's word: the error bits of completed steps.
    """

    def __init__(
        self,
        arena: Any,
        epoch: Callable[[], int],
        *,
        timeout_us: int,
        device: torch.device | str,
        split: tuple[int, int, int] = (1, 1, 1),
        faults: Tensor | None = None,
        rank: int = 0,
    ) -> None:
        spec = arena.spec
        self.arena, self.split, self.timeout_us = arena, split, timeout_us
        self._epoch_now, self.epoch = epoch, 0
        self._heads, L = [spec.num_q_heads, spec.head_dim], spec.num_layers
        self.state = torch.zeros(4, dtype=torch.int64, device=device)
        self.open_seq, self.awaited, self.answered = self.state.new_zeros(3, 2 * L).unbind()
        self.asked = torch.zeros(2 * L, spec.max_batch, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        super().__init__(self.state.new_zeros(L))
        if faults is None:
            faults = torch.zeros(1, dtype=torch.int64, pin_memory=self.state.is_cuda)
        self._faults, self.fault = faults, faults[rank][None]

    def set_epoch(self, epoch: int) -> None:
        """From the next step on, records go to the attention process of ``epoch``, or to nobody (0).

        Call between steps, and with a new epoch only when the previous one is dead: its unanswered records are dropped.
        """
        self.epoch = epoch
        # An assignment would copy the number from host memory and synchronize with the stream.
        self.state[0].fill_(epoch)
        self.open_seq.zero_()
        self.awaited.zero_()

    def pause(self) -> None:
        self.set_epoch(0)

    def begin_step(self, step: int) -> None:
        if (epoch := self._epoch_now()) != self.epoch:
            self.set_epoch(epoch)
        self.state[1].fill_(step)

    def post(self, layer: int, query: Tensor, pages: Tensor, n_pages: Tensor) -> None:
        """A no-op if no row has a page. ``pages`` are packed to the left, see `select_pages`. Raises ValueError if B *
        C is above max_batch or k above max_pages, or a layout is wrong."""
        (rows, k), spec = pages.shape, self.arena.spec
        most = [spec.max_batch, spec.max_pages]
        if rows > most[0] or k > most[1] or rows % spec.lists:
            raise ValueError(f"post: pages is {list(pages.shape)}, the ring has room for {most}")
        _check("query", query, rows // spec.lists, *self._heads)
        _check("pages", pages, rows, k)
        _check("n_pages", n_pages, rows)
        if rows:
            with self._slice("ahead", "post", layer):
                kernels.doorbell.post(self, layer, query, pages, n_pages)

    def merge(
        self, layer: int, ticket: None, query: Tensor, here: Attended, change: Tensor | None = None
    ) -> Tensor:
        """The device's part alone without a post, and without a valid answer, which `faults` reports."""
        (out, lse), (B, HQ) = here, here[1].shape
        _check("out", out, B, *self._heads)
        _check("lse", lse, B, HQ)
        if change is not None:
            _check("change", change, B, HQ)
        if not B:
            return out.to(query.dtype)
        with self._slice("attention", "merge", layer):
            return kernels.doorbell.merge(self, layer, out, lse, change, query.dtype)

    def _slice(self, row: str, name: str, layer: int) -> AbstractContextManager[None]:
        return self.stamps.slice(row, name, layer=layer) if self.stamps else nullcontext()

    def errors(self) -> list[str]:
        """Errors since the last call. Synchronizes with the stream: call between steps."""
        bits = int(self.state[3])
        self.state[3].fill_(0)
        self.fault.zero_()
        return texts(bits)

    def faults(self) -> list[str]:
        """Errors of completed steps, on any rank, since its last call of `errors`. Does not synchronize."""
        bits = 0
        for word in self._faults.tolist():
            bits |= word
        return texts(bits)


def _check(name: str, x: Tensor, *shape: int) -> None:
    if x.shape != shape or not x.is_contiguous():
        found = f"{list(x.shape)} with strides {x.stride()}"
        raise ValueError(f"ring: {name} is {found}, expected {list(shape)}, contiguous")
