"""Predict a layer's query from the input of the layer before it.

ScoutAttention Algorithm 1 line 4: Q_pred = W_Q^(l+1) X^l. The residual stream changes little from one layer to the
next, so the next layer's norm, projection, head norm and RoPE of this layer's input approximate its query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_scout.ops.predict import add_norm, rotate_heads


@dataclass(frozen=True)
class QueryHeads:
    """How a layer makes its query of the projection's output: head norm and RoPE; see :func:`rotate_heads`.

    Attributes:
        cos_sin: returns the table, which SGLang replaces by one of another dtype.
        norm_weight, norm_eps: RMSNorm per head, or None.
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    is_neox: bool
    cos_sin: Callable[[], torch.Tensor]
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 0.0


@dataclass(frozen=True)
class QueryProjector:
    """A layer's query from any layer's input, in two parts.

    Attributes:
        norm_weight, norm_eps: of the RMSNorm before the projection.
        w_q, b_q: ``[HQ * D, hidden]``, and a bias or None.
        quantized: the layer's own projection, in place of ``w_q``: normed input -> (q, k, v side by side, and a bias
            that it has not added or None).
    """

    norm_weight: torch.Tensor
    norm_eps: float
    heads: QueryHeads
    w_q: torch.Tensor | None = None
    b_q: torch.Tensor | None = None
    quantized: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None
    weight_bytes: int = 0

    def start(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """``[B, ...]`` newly allocated, from a layer input ``x`` ``[B, hidden]`` and a residual to add to it or None.

        Runs on the model's stream, as the model overwrites the layer input afterwards. A quantised projection too, K
        and V included, 1 + 2 H / HQ times the work: such GEMMs may share a workspace.
        """
        normed = add_norm(x, residual, self.norm_weight, self.norm_eps)
        if self.quantized is None:
            return normed
        q_size = self.heads.num_heads * self.heads.head_dim
        qkv, bias = self.quantized(normed)
        q = qkv[:, :q_size]
        return q if bias is None else q + bias[:q_size]

    def finish(self, started: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[B, HQ, D]`` query after RoPE, of the model's dtype, at ``positions`` ``[B]``. May run on a side stream."""
        q, of = started, self.heads
        if self.w_q is not None:
            q = torch.nn.functional.linear(started, self.w_q, self.b_q)
        norm = of.norm_weight, of.norm_eps
        sizes = of.rotary_dim, of.is_neox, of.num_heads, of.head_dim
        return rotate_heads(q, *norm, of.cos_sin(), positions, *sizes)
