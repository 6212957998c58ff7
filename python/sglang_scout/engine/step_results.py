"""Asynchronous readback of steps' selections and wait times.

A step writes them to buffers of the device. The next boundary launches the readback, before the next step overwrites
them, and the boundary after that takes the values.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_scout.engine.device import Fetching
from sglang_scout.engine.policy import RESULT_DELAY_STEPS
from sglang_scout.engine.requests import Batch
from sglang_scout.engine.stores import Sizes
from sglang_scout.engine.trace import Cut, DeviceClock


@dataclass
class LaunchedStep:
    """A step, L layers, the B rows of its batch; its results once the host knows them."""

    step: int
    start_ns: int  # of its boundary
    batch: Batch
    begun_ns: int = 0  # end of its boundary
    end_ns: int = 0  # 0: not known yet
    results: Fetching | None = None
    cuts: list[Cut] = field(default_factory=list)  # of its timeline
    pages: npt.NDArray[np.int32] = field(init=False)  # [L, B, C * k] selected by lists, -1 padded
    missing: npt.NDArray[np.int32] = field(init=False)  # [L, B, C * k] of them, not resident
    waited_ns: npt.NDArray[np.int64] = field(init=False)  # [L] for the worker, since the last step
    cosine: npt.NDArray[np.float32] = field(init=False)  # [L] of predicted and real queries, or NaN


class StepResults:
    """Device buffers that steps write to, and the launched steps.

    Args:
        waited_ns: ``[L]`` int64, time waited since the ring was created; read only.
        clock: stamps of a timeline, if recorded.

    Attributes:
        pages, missing: ``[L, max_batch * C, k]`` int32 on the device.
        cosine: ``[L]`` float32 on the device.
    """

    def __init__(
        self,
        layers: int,
        sizes: Sizes,
        waited_ns: Tensor,
        device: torch.device,
        clock: DeviceClock | None = None,
    ) -> None:
        self._clock = clock
        self._lists = sizes.lists
        rows = sizes.max_batch * sizes.lists
        both = 2, layers, rows, sizes.budget_pages
        self._both = torch.full(both, -1, dtype=torch.int32, device=device)
        self.pages, self.missing = self._both
        self.cosine = torch.full((layers,), torch.nan, device=device)
        self._sent = [self._both, waited_ns, self.cosine]
        if clock is not None:
            self._sent.append(clock.stamps)
        self._on_host = [
            [t.cpu().pin_memory() for t in self._sent] if device.type == "cuda" else None
            for _ in range(2)
        ]
        self._launched: deque[LaunchedStep] = deque()
        self._waited_before = waited_ns.cpu().numpy().copy()  # of another engine

    @property
    def running(self) -> LaunchedStep:
        """The step launched last."""
        return self._launched[-1]

    def launch(self, step: int, start_ns: int, batch: Batch) -> None:
        """A step is about to be launched."""
        self._launched.append(LaunchedStep(step, start_ns, batch, time.monotonic_ns()))

    def ended(self, end_ns: int) -> None:
        """The tokens of the oldest unfinished step are on the host."""
        for launched in self._launched:
            if not launched.end_ns:
                launched.end_ns = end_ns
                return

    def of(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Buffers for the selected and the missing pages of a layer, each [rows, k]."""
        return self.pages[layer, :rows], self.missing[layer, :rows]

    def compare(self, layer: int, query: Tensor, query_ahead: Tensor, live: Tensor) -> None:
        """Record the cosine of a layer's predicted query, for ``live`` ``[B]`` rows: a captured batch may be padded."""
        cosine = torch.cosine_similarity(query.float(), query_ahead.float(), dim=-1).mean(1)
        self.cosine[layer] = cosine.where(live, 0.0).sum() / live.sum()

    def send_for(self) -> None:
        """Boundary: launch the readback of the last launched step."""
        if self._launched:
            last = self._launched[-1]
            last.results = Fetching(self._sent, self._on_host[last.step & 1])
            if self._clock is not None and not last.batch.is_dense:
                last.cuts = self._clock.cuts

    def take(self) -> LaunchedStep | None:
        """The results of the step launched ``RESULT_DELAY_STEPS`` boundaries ago, if there was one; valid until the
        next :meth:`send_for`."""
        if len(self._launched) < RESULT_DELAY_STEPS:
            return None
        done = self._launched.popleft()
        done.end_ns = done.end_ns or self._launched[0].start_ns
        assert done.results is not None
        (pages, missing), waited_ns, done.cosine, *stamps = done.results.wait()
        rows = len(done.batch.ages)
        used = [x[:, : rows * self._lists].reshape(len(x), rows, -1) for x in (pages, missing)]
        if done.batch.is_dense:  # it wrote nothing
            used = [np.zeros((len(pages), rows, 0), np.int32)] * 2
            done.cosine = np.full_like(done.cosine, np.nan)
        done.pages, done.missing = used
        done.waited_ns = waited_ns - self._waited_before
        self._waited_before = waited_ns.copy()
        if self._clock is not None:
            self._clock.write(done.step, done.cuts, stamps[0], done.waited_ns)
        return done
