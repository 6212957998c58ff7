"""A mini decode worker with the graph transport, in Triton's interpreter.

The pages are in a real arena; missing pages are posted by the ring's kernels to real worker threads, or to the
attendant if there are none.
"""

from __future__ import annotations

import os

import pytest
import torch

from mini_worker import SIZE, MiniWorker
from sglang_scout import _native
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.engine.memory import ServerSize
from sglang_scout.engine.stores import HostPages, context_pages
from sglang_scout.ops import triton
from sglang_scout.worker.arena import Arena, PageChecksums

if not triton.interpreted():
    pytest.skip("needs Triton's interpreter: the arena is not registered", allow_module_level=True)

MAX_PAGES = 40


class GraphWorker(MiniWorker):
    """As :class:`MiniWorker`; ``threads``: whether worker threads, not the attendant, compute missing pages."""

    def __init__(self, *, threads=False, **kwargs):
        self.threads = threads
        super().__init__(max_pages=MAX_PAGES, **kwargs)

    def _make_host(self, pages):
        s = self.shape
        sizes = self.settings.max_batch, MAX_PAGES * SIZE, [1]
        self.arena = Arena.create(ServerSize(self.config, self.policy, s, *sizes).arena(pages))
        flat = [], []
        for half, plane in zip(flat, (self.arena.k_pages, self.arena.v_pages), strict=True):
            for layer in range(s.num_layers):
                half.append(torch.from_numpy(plane(layer)).view(s.dtype).flatten(0, 1))
                half[-1].copy_(torch.randn(half[-1].shape))
        checksums = PageChecksums(self.arena) if self.config.page_checksums else None
        return HostPages(s, *flat, context_pages(self.arena, s), checksums)

    def _worker(self, missing):
        arena = self.arena
        self.producer = _native.RingProducer(arena.address, arena.nbytes)
        self.epoch = self.producer.next_epoch()
        self.runtime = None
        if self.threads:
            cpu = sorted(os.sched_getaffinity(0))[-1]
            self.runtime = _native.RingRuntime(arena.address, arena.nbytes, self.epoch, [cpu], 0, 1)
            self.producer.set_live_epoch(self.epoch)
        self.attendant = _native.RingAttendant(self.producer, 50)
        of_ring = {"timeout_us": 20_000_000, "device": "cpu"}
        self.ring = GraphTransport(arena, lambda: self.epoch, **of_ring)
        return self.ring

    def end_threads(self):
        """Ends the worker's epoch; from the next step on no worker serves."""
        self.producer.set_live_epoch(0)
        self.runtime.stop()
        self.epoch = self.producer.next_epoch()

    def close(self):
        super().close()
        self.attendant.stop()
        if self.runtime is not None:
            self.runtime.stop()
        self.arena.close()
