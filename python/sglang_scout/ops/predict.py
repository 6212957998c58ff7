"""Predict a layer's query from the input of the layer before it.

ScoutAttention Algorithm 1 line 4: Q_pred = W_Q^(l+1) X^l. The residual stream changes little from
one layer to the next, so the next layer's own norm, projection, head norm and rotation applied to
this layer's input come close to the query that it will compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.registry import Tolerance
from . import triton
from .op import Call, op

QueryProjector = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer input [B, hidden], positions [B]) -> query after RoPE, [B, HQ, D] float32."""

TOLERANCES = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 matrix product over the hidden size in another order"),
    "bfloat16": Tolerance(2**-5, 2**-6, "up to two roundings to 8 bits in norm, product, rotation"),
    "float16": Tolerance(2**-8, 2**-9, "up to two roundings to 11 bits in norm, product, rotation"),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in fp32, rounded once to the dtype of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def rotate(q: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, is_neox: bool) -> torch.Tensor:
    """RoPE (RoFormer equation 34) on the first ``rotary_dim`` channels of q [B, HQ, D].

    cos_sin [B, rotary_dim]: the cosines, then the sines. Neox turns channel i against
    i + rotary_dim / 2, otherwise neighbours are turned against each other. Computed in the wider of
    the two dtypes: SGLang keeps a float32 table on CUDA, one in the model's dtype on the CPU.
    """
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    turned, passed = q[..., :rotary_dim], q[..., rotary_dim:]
    if is_neox:
        x, y = turned.chunk(2, dim=-1)
    else:
        x, y = turned[..., ::2], turned[..., 1::2]
    x, y = x * cos - y * sin, y * cos + x * sin
    turned = torch.cat((x, y), -1) if is_neox else torch.stack((x, y), -1).flatten(-2)
    return torch.cat((turned.to(q.dtype), passed), -1) if passed.shape[-1] else turned.to(q.dtype)


def _valid(call: Call) -> str:
    rotary_dim, D = call["rotary_dim"], call["D"]
    if call["cos_sin"] is not None and (not 0 < rotary_dim <= D or rotary_dim % 2):
        return f"rotary_dim is {rotary_dim}, expected an even number in 2..{D}"
    return ""


@op(
    _valid,
    HQ="HQ",
    D="D",
    rotary_dim="R",
    x="B C model",
    norm_weight="C norm_dtype",
    w_q="HQ*D C model",
    b_q="HQ*D model",
    q_norm_weight="D q_norm_dtype",
    cos_sin="M R table_dtype",
    positions="B int64",
    tolerances=TOLERANCES,
)
def predict_query(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    w_q: torch.Tensor,
    b_q: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    q_norm_eps: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    rotary_dim: int,
    is_neox: bool,
    HQ: int,
    D: int,
) -> torch.Tensor:
    """The query that a layer will (nearly) compute, from an earlier layer's input.

    All weights belong to the layer predicted for; ``x`` is not changed. Rounds where SGLang rounds.

    Args:
        x: [B, hidden] model dtype: residual stream at the input of an earlier (or the same) layer.
        norm_weight, norm_eps: [hidden], input RMSNorm.
        w_q, b_q: [HQ * D, hidden] and [HQ * D] or None, dtype of ``x``.
        q_norm_weight, q_norm_eps: [D] or None, RMSNorm per query head (Qwen3).
        cos_sin: [max_pos, rotary_dim] or None for no rotation; float32 or dtype of ``x``.
        positions: [B] int64 in [0, max_pos), position of the query's token.
        rotary_dim, is_neox: how many leading channels turn (GLM4: half of them), and how they pair.
        HQ, D: query heads and head size.
    Returns:
        [B, HQ, D] float32; the values are rounded to the dtype of ``x``, as the model's query is.
    Source: ScoutAttention Algorithm 1 line 4, section 3.3.
    """
    q = torch.nn.functional.linear(rms_norm(x, norm_weight, norm_eps), w_q, b_q).view(-1, HQ, D)
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, q_norm_eps)
    if cos_sin is not None:
        q = rotate(q, cos_sin.index_select(0, positions), rotary_dim, is_neox)
    return q.float()


triton.implements(predict_query, "predict")
