"""The arrays of a slot, which only producers, the worker's threads and tests that play one of them touch."""

from __future__ import annotations

import numpy as np

from sglang_scout.worker.ring import RingView

F32, I32 = np.dtype("<f4"), np.dtype("<i4")


def record_data(view: RingView, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q f32 [max_batch, HQ, D], pages i32 [max_batch, k], n_pages i32 [max_batch]."""
    s, at = view._spec, view._layout
    base = at.records_offset + slot * at.record_stride
    q = view._view(base + at.q_offset, (s.max_batch, s.num_q_heads, s.head_dim), F32)
    pages = view._view(base + at.pages_offset, (s.max_batch, s.max_pages), I32)
    return q, pages, view._view(base + at.n_pages_offset, (s.max_batch,), I32)


def reply_data(view: RingView, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """out f32 [max_batch, HQ, D], lse f32 [max_batch, HQ]."""
    s, at = view._spec, view._layout
    base = at.replies_offset + slot * at.reply_stride
    out = view._view(base + at.out_offset, (s.max_batch, s.num_q_heads, s.head_dim), F32)
    return out, view._view(base + at.lse_offset, (s.max_batch, s.num_q_heads), F32)
