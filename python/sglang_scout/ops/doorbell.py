"""The request ring driven from a stream: post and merge are kernel launches, without any host round trip.

The device-side counterpart of `worker.client`, for steps that run as a CUDA graph. The oracle is the C++ producer: a
post must leave the same bytes in the ring.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from . import triton as kernels

ERRORS = {1: "no answer in time", 2: "CPU attention refused a record", 4: "a slot was not answered"}


def texts(bits: int) -> list[str]:
    return [text for bit, text in ERRORS.items() if bits & bit]


class DeviceRing:
    """The producer of a ring in pinned host memory, on a device's current stream.

    Posts are ordered with each other, and so are merges; a layer is merged after its post, possibly concurrently with
    the post of another. A step posts at most once per layer. A capture bakes nothing in: number, epoch and step live in
    device memory. While the epoch is 0, as in warm-up and capture, nothing is posted.

    Args:
        address: of the ring as seen by the device.
        layout, spec: a `worker.ring.Layout` and a `worker.ring.ArenaSpec`.
        split: into how many runs the pages of each row are split, a `worker.ring.Split`.
        timeout_us: how long a merge waits for CPU attention, above 0.
        faults: [R] int64 in host memory that the device can write to, one word for each of R ranks that step together.
            None: one word, allocated here.
        rank: index of the word that this ring writes.

    Attributes:
        state: [4] int64: epoch, step, number of the last post, error bits.
        open_seq: [2 L] int64, in-flight records (no answer yet).
        waited_ns: [L] int64, accumulated wait time of each layer's merges, since the start.
        fault: [1] int64, this rank's word: the error bits of completed steps.
    """

    def __init__(
        self,
        address: int,
        layout: Any,
        spec: Any,
        *,
        timeout_us: int,
        device: torch.device | str,
        split: tuple[int, int, int] = (1, 1, 1),
        faults: Tensor | None = None,
        rank: int = 0,
    ) -> None:
        self.address, self.layout, self.spec = address, layout, spec
        self.split, self.timeout_us = split, timeout_us
        self._heads, L = (spec.num_q_heads, spec.head_dim), spec.num_layers
        self.state = torch.zeros(4, dtype=torch.int64, device=device)
        self.open_seq, self.awaited, self.answered = self.state.new_zeros(3, 2 * L).unbind()
        self.asked = torch.zeros(2 * L, spec.max_batch, dtype=torch.int32, device=device)
        self.waited_ns = self.state.new_zeros(L)
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        if faults is None:
            faults = torch.zeros(1, dtype=torch.int64, pin_memory=self.state.is_cuda)
        self._faults, self.fault = faults, faults[rank][None]

    def set_epoch(self, epoch: int, posts: int | None = None) -> None:
        """From the next step on, records go to the attention process of ``epoch``, or to nobody (0).

        Call between steps, and with a new epoch only when the previous one is dead: its unanswered records are dropped.
        ``posts``: number of the last post in the ring, if others posted.
        """
        # An assignment would copy the number from host memory and synchronize with the stream.
        self.state[0].fill_(epoch)
        if posts is not None:
            self.state[2].fill_(posts)
        self.open_seq.zero_()
        self.awaited.zero_()

    def begin_step(self, step: int) -> None:
        """Set the number of the next step, counting up. Call between steps."""
        self.state[1].fill_(step)

    def post(
        self,
        layer: int,
        q: Float[Tensor, "B HQ D"],
        pages: Int32[Tensor, "BC k"],
        n_pages: Int32[Tensor, " BC"],
    ) -> None:
        """Post the missing pages of a layer for CPU attention; if no row has any, this is a no-op.

        Args:
            pages: packed to the left, see `select_pages`; B*C up to max_batch, k up to max_pages. With C
                lists in the spec, row b * C + c is the page list of the KV heads of list c.
        Raises:
            ValueError: a size or layout is wrong.
        """
        rows, k = pages.shape
        most = [self.spec.max_batch, self.spec.max_pages]
        if rows > most[0] or k > most[1] or rows % self.spec.lists:
            raise ValueError(f"post: pages is {list(pages.shape)}, the ring has room for {most}")
        shape = [rows // self.spec.lists, *self._heads]
        self._check(
            "post", layer, q=(q, shape), pages=(pages, [rows, k]), n_pages=(n_pages, [rows])
        )
        if rows:
            kernels.doorbell.post(self, layer, q, pages, n_pages)

    def merge(
        self,
        layer: int,
        out: Float[Tensor, "B HQ D"],
        lse: Float32[Tensor, "B HQ"],
        change: Float32[Tensor, "B HQ"] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "B HQ D"]:
        """Wait for the answer to this step's post of the layer and merge it with ``out``, ``lse``.

        Returns ``out`` without a post, and without a valid answer, which `errors` reports.

        Args:
            out, lse: B as posted.
            change: correction added to the answer's lse.
            dtype: of the result.
        """
        B, (HQ, D) = len(out), self._heads
        changes = {} if change is None else {"change": (change, [B, HQ])}
        self._check("merge", layer, out=(out, [B, HQ, D]), lse=(lse, [B, HQ]), **changes)
        return kernels.doorbell.merge(self, layer, out, lse, change, dtype) if B else out.to(dtype)

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

    def _check(self, op: str, layer: int, **tensors: tuple[Tensor, list[int]]) -> None:
        if not 0 <= layer < self.spec.num_layers:
            raise ValueError(f"{op}: layer is {layer}, expected 0..{self.spec.num_layers - 1}")
        for name, (x, shape) in tensors.items():
            if list(x.shape) != shape or not x.is_contiguous():
                found = f"{list(x.shape)} with strides {x.stride()}"
                raise ValueError(f"{op}: {name} is {found}, expected {shape}, contiguous")


def write_stamp(stamps: Tensor, index: int) -> None:
    """Write the device clock in nanoseconds to ``stamps[index]``, int64, in order on the current stream.

    A captured graph writes it again in every replay. On the CPU device the clock is ``time.monotonic_ns``.
    """
    if stamps.device.type == "cpu" and not kernels.interpreted():
        stamps[index] = time.monotonic_ns()
    else:
        kernels.system.stamp_kernel[(1,)](stamps, index, num_warps=1)
