"""What makes a query of a layer's input, besides the projection (``engine/projector.py``): norm, head norm and RoPE."""

from __future__ import annotations

from typing import Annotated

import torch

from .op import Call, Tolerance, op

TOLERANCES = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 sums over the hidden size in another order"),
    "bfloat16": Tolerance(2**-5, 2**-6, "up to two roundings to 8 bits in norm, product, rotation"),
    "float16": Tolerance(2**-8, 2**-9, "up to two roundings to 11 bits in norm, product, rotation"),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in fp32, rounded once to the dtype of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


@op(tolerances=TOLERANCES)
def add_norm(
    x: Annotated[torch.Tensor, "B C model"],
    residual: Annotated[torch.Tensor | None, "B C model"],
    weight: Annotated[torch.Tensor, "C norm_dtype"],
    eps: float,
) -> torch.Tensor:
    """RMSNorm of a layer's input as SGLang passes it: the previous layer's output and the residual stream.

    Args:
        x, residual: their sum in that dtype is the input; ``x`` alone without a residual.
        weight, eps: of the norm.
    Returns:
        [B, C] dtype of ``x``, never aliasing ``x``.
    """
    return rms_norm(x if residual is None else x + residual, weight, eps)


def rotate(q: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, is_neox: bool) -> torch.Tensor:
    """RoPE (RoFormer equation 34) on the first ``rotary_dim`` channels of q [B, HQ, D].

    cos_sin [B, rotary_dim]: cosines, then sines, on CUDA in float32 also of a bf16 model. Neox style pairs channel i
    with i + rotary_dim / 2, otherwise adjacent channels are paired."""
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


@op(_valid, tolerances=TOLERANCES)
def rotate_heads(
    q: Annotated[torch.Tensor, "B HQ*D model"],
    q_norm_weight: Annotated[torch.Tensor | None, "D q_norm_dtype"],
    q_norm_eps: float,
    cos_sin: Annotated[torch.Tensor | None, "M R table_dtype"],
    positions: Annotated[torch.Tensor, "B int64"],
    rotary_dim: Annotated[int, "R"],
    is_neox: bool,
    HQ: Annotated[int, "HQ"],
    D: Annotated[int, "D"],
) -> torch.Tensor:
    """Attention-ready query from the projection's output: head norm and RoPE. Rounds where SGLang rounds.

    Args:
        q: rows may be strided.
        q_norm_weight, q_norm_eps: RMSNorm per query head (Qwen3), or None.
        cos_sin: None for no rotation; float32 or dtype of ``q``.
        positions: in [0, M), position of the query's token.
        rotary_dim, is_neox: how many leading channels are rotated (GLM4: half of them), and how they pair.
        HQ, D: query heads and head size.
    Returns:
        [B, HQ, D] of the dtype of ``q``, as the model's query is.
    """
    q = q.reshape(-1, HQ, D)
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, q_norm_eps)
    if cos_sin is not None:
        q = rotate(q, cos_sin.index_select(0, positions), rotary_dim, is_neox)
    return q


add_norm.triton("predict")
rotate_heads.triton("predict", strided_rows=("q",))
