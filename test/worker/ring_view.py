"""Numpy views of an arena's shared words, for tests that inspect the ring or play one of its sides."""

import contextlib
import math
import mmap
import os

import numpy as np

from sglang_scout import _native
from sglang_scout.worker.arena import Arena

CLOSED_ITEM = _native.RING_CLOSED_ITEM
CONTROL, BELL, STAT_LINE, RECORD, REPLY, EVENT = (
    np.dtype(_native.RING_STRUCTS[name])
    for name in ("Control", "Bell", "StatLine", "RecordHeader", "ReplyHeader", "Event")
)
F32, I32, U64 = np.dtype("<f4"), np.dtype("<i4"), np.dtype("<u8")


def writable(fd: int) -> Arena:
    """The arena of a file, fully writable, so that tests can corrupt it. ``fd`` stays owned by the caller."""
    with contextlib.closing(Arena.attach(fd)) as arena:
        memory = np.frombuffer(mmap.mmap(fd, arena.nbytes), np.uint8)
        return Arena(os.dup(fd), memory, arena.spec, arena.backing)


class RingView:
    """The words of an arena's ring; copies nothing."""

    def __init__(self, arena: Arena) -> None:
        self._memory, self._spec, self._at = arena._mapped(), arena.spec, arena.layout
        self._values = F32 if arena.spec.q_dtype == "float32" else np.dtype(np.uint16)
        at = self._at
        self.control = self._view(at.control_offset, (1,), CONTROL)[0]
        self.bell = self._view(at.bell_offset, (1,), BELL)[0]
        self.stats = self._view(at.stats_offset, (at.stat_lines,), STAT_LINE)
        self.log = self._view(at.log_offset, (at.log_entries,), U64)
        self.events = self._view(at.events_offset, (at.stat_lines, at.event_entries), EVENT)

    def _view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).reshape(shape)

    def slot(self, layer: int, step: int) -> int:
        return (step & 1) * self._spec.num_layers + layer

    def record(self, slot: int) -> np.void:
        return self._view(self._record(slot), (1,), RECORD)[0]

    def reply(self, slot: int) -> np.void:
        return self._view(self._reply(slot), (1,), REPLY)[0]

    def record_data(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q f32, or the bits of bf16, [max_batch, row_heads, D], pages i32 [max_batch, k], n_pages i32 [max_batch]."""
        s, at, base = self._spec, self._at, self._record(slot)
        q = self._view(base + at.q_offset, (s.max_batch, s.row_heads, s.head_dim), self._values)
        pages = self._view(base + at.pages_offset, (s.max_batch, s.max_pages), I32)
        return q, pages, self._view(base + at.n_pages_offset, (s.max_batch,), I32)

    def reply_data(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """out f32, or the bits of bf16, [max_batch, row_heads, D], lse f32 [max_batch, row_heads]."""
        s, at, base = self._spec, self._at, self._reply(slot)
        out = self._view(base + at.out_offset, (s.max_batch, s.row_heads, s.head_dim), self._values)
        return out, self._view(base + at.lse_offset, (s.max_batch, s.row_heads), F32)

    def _record(self, slot: int) -> int:
        return self._at.records_offset + slot * self._at.record_stride

    def _reply(self, slot: int) -> int:
        return self._at.replies_offset + slot * self._at.reply_stride
