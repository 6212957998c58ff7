"""What makes a query of a layer's input, besides the projection (``engine/ahead.py``): norm, head norm and RoPE."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from . import triton as kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in fp32, rounded once to the dtype of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def add_norm(
    x: Float[Tensor, "B C"],
    residual: Float[Tensor, "B C"] | None,
    weight: Float[Tensor, " C"],
    eps: float,
) -> Float[Tensor, "B C"]:
    """RMSNorm of a layer's input as SGLang passes it: the sum, in that dtype, of the previous layer's output and the
    residual stream. A new tensor of the dtype of ``x``."""
    run = kernels.predict.add_norm if x.is_cuda else add_norm_reference
    return run(x, residual, weight, eps)


def add_norm_reference(x, residual, weight, eps):
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


def rotate_heads(
    q: Float[Tensor, "B {HQ*D}"],
    q_norm_weight: Float[Tensor, " {D}"] | None,
    q_norm_eps: float,
    cos_sin: Float[Tensor, "M {rotary_dim}"] | None,
    positions: Int64[Tensor, " B"],
    rotary_dim: int,
    is_neox: bool,
    HQ: int,
    D: int,
) -> Float[Tensor, "B {HQ} {D}"]:
    """Attention-ready query, of the dtype of ``q``, from the projection's output: head norm and RoPE, rounded where
    SGLang rounds.

    Args:
        q: rows may be strided.
        q_norm_weight, q_norm_eps: RMSNorm per query head (Qwen3), or None.
        cos_sin: see `rotate`; None: no rotation.
        rotary_dim, is_neox: how many leading channels are rotated (GLM4: half of them), and how they pair.
    """
    run = kernels.predict.rotate_heads if q.is_cuda else rotate_heads_reference
    return run(q, q_norm_weight, q_norm_eps, cos_sin, positions, rotary_dim, is_neox, HQ, D)


def rotate_heads_reference(
    q, q_norm_weight, q_norm_eps, cos_sin, positions, rotary_dim, is_neox, HQ, D
):
    q = q.reshape(-1, HQ, D)
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, q_norm_eps)
    if cos_sin is not None:
        q = rotate(q, cos_sin.index_select(0, positions), rotary_dim, is_neox)
    return q
