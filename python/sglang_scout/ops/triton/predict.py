"""`add_norm` and `rotate_heads` on the device, one launch each; the model's own GEMM runs between them."""

import torch
import triton
import triton.language as tl

from .common import rounded


@triton.jit
def norm_kernel(x, residual, weight, out, eps, C, BLOCK: tl.constexpr):
    """RMSNorm of one row of the sum. x, residual (or None), out [B, C]; weight [C]."""
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + b * C + c, mask=c < C, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + b * C + c, mask=c < C, other=0.0).to(tl.float32)
        value = rounded(value, x.dtype.element_ty).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / C + eps)
    scaled = value * scale * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + b * C + c, rounded(scaled, out.dtype.element_ty), mask=c < C)


@triton.jit
def rotate_kernel(
    q, weight, cos_sin, positions, out,
    eps, HQ, row_stride,
    D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr,
):
    """RMSNorm and RoPE of one head. q [B, HQ, D], rows row_stride apart; cos_sin [positions, R]; out [B, HQ, D]. The
    partner of channel d is loaded again rather than exchanged between threads."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, triton.next_power_of_2(D))
    row = b * row_stride + h * D
    own = tl.load(q + row + d, mask=d < D, other=0.0).to(tl.float32)
    if weight is not None:
        scale = 1 / tl.sqrt(tl.sum(own * own, axis=0) / D + eps)
        own = own * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        own = rounded(own, q.dtype.element_ty).to(tl.float32)
    if cos_sin is not None:
        half: tl.constexpr = R // 2
        if NEOX:
            first, angle = d < half, d % half
            partner = tl.where(first, d + half, d - half)
        else:
            first, angle = d % 2 == 0, d // 2
            partner = tl.where(first, d + 1, d - 1)
        turns = d < R
        # [BLOCK_D], rotated channels only
        other = tl.load(q + row + partner, mask=turns, other=0.0).to(tl.float32)
        if weight is not None:
            other = other * scale * tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
            other = rounded(other, q.dtype.element_ty).to(tl.float32)
        at = cos_sin + tl.load(positions + b) * R + angle
        cos = tl.load(at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(at + half, mask=turns, other=0.0).to(tl.float32)
        turned = own * cos + tl.where(first, -other, other) * sin
        own = tl.where(turns, turned, own)
    tl.store(out + (b * HQ + h) * D + d, rounded(own, q.dtype.element_ty), mask=d < D)


def add_norm(x, residual, weight, eps):
    (B, C), out = x.shape, torch.empty_like(x)
    norm_kernel[(B,)](x, residual, weight, out, eps, C, triton.next_power_of_2(C), num_warps=8)
    return out


def rotate_heads(q, q_norm_weight, q_norm_eps, cos_sin, positions, rotary_dim, is_neox, HQ, D):
    out = q.new_empty((len(q), HQ, D))
    rotate_kernel[(len(q), HQ)](
        q, q_norm_weight, cos_sin, positions, out, q_norm_eps, HQ, q.stride(0), D,
        rotary_dim, is_neox, num_warps=1,
    )
    return out
