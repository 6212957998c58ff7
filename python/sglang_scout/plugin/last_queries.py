"""The real queries of each prompt's last token, captured from prefill attention."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_scout.engine.device import upload

KEPT_BATCHES = 3
"""More than one, as SGLang sends a batch's KV while the next one runs."""


@dataclass
class _Batch:
    rids: list[str]
    last: torch.Tensor  # [B] row of each request's last token
    layers: list[torch.Tensor] = field(default_factory=list)  # [B, HQ, D] each


class LastQueries:
    """Records prefill attention queries; keeps one token per request of each batch."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=KEPT_BATCHES)

    def listen_to(self, backend: Any) -> None:
        """Record the calls of SGLang's attention ``backend`` from now on."""
        original = backend.forward_extend

        def forward_extend(
            q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.note(q, layer, forward_batch)
            return original(q, k, v, layer, forward_batch, *args, **kwargs)

        backend.forward_extend = forward_extend

    def note(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """``q`` ``[T, HQ * D]`` of all tokens of a batch, after RoPE."""
        if not forward_batch.rids:
            return  # SGLang warms up or captures
        if layer.layer_id == 0:
            last = np.cumsum(forward_batch.extend_seq_lens_cpu) - 1
            self._batches.append(_Batch(forward_batch.rids, upload(last, q.device)))
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).index_select(
            0, self._batches[-1].last
        )
        self._batches[-1].layers.append(rows)

    def of(self, rid: str) -> torch.Tensor | None:
        """``[L, HQ, D]`` fp32 queries of the last token of request ``rid`` in its newest batch."""
        for batch in reversed(self._batches):
            if rid in batch.rids:
                row = batch.rids.index(rid)
                return torch.stack([queries[row] for queries in batch.layers]).float()
        return None
