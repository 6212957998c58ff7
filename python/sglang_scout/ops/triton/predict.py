"""`predict_query` on the device: its own norm and rotation, one launch each, around a product of cuBLAS.

Bytes that must move: the weight, HQ D C e, as for any projection; the two kernels read and write 2 C e and
(e + 4) HQ D a row.
"""

import torch
import triton
import triton.language as tl

from .exact import rounded


@triton.jit
def norm_kernel(x, weight, out, eps, C, BLOCK: tl.constexpr):
    """RMSNorm of one row. x, out [B, C]; weight [C]."""
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    # [BLOCK]
    value = tl.load(x + b * C + c, mask=c < C, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / C + eps)
    scaled = value * scale * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + b * C + c, rounded(scaled, out.dtype.element_ty), mask=c < C)


@triton.jit
def rotate_kernel(
    q, weight, cos_sin, positions, out,
    eps, HQ,
    D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """RMSNorm and rotation of one head. q [B, HQ, D]; cos_sin [positions, R]; out [B, HQ, D] float32.

    Channel d turns with its partner, which is read again rather than moved between threads.
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    row = (b * HQ + h) * D
    # [BLOCK_D]
    own = tl.load(q + row + d, mask=d < D, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(own * own, axis=0) / D + eps)
        own = own * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        own = rounded(own, q.dtype.element_ty).to(tl.float32)
    if R > 0:
        half: tl.constexpr = R // 2
        if NEOX:
            first, angle = d < half, d % half
            partner = tl.where(first, d + half, d - half)
        else:
            first, angle = d % 2 == 0, d // 2
            partner = tl.where(first, d + 1, d - 1)
        turns = d < R
        # [BLOCK_D], of the channels that turn
        other = tl.load(q + row + partner, mask=turns, other=0.0).to(tl.float32)
        if HAS_NORM:
            other = other * scale * tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
            other = rounded(other, q.dtype.element_ty).to(tl.float32)
        at = cos_sin + tl.load(positions + b) * R + angle
        cos = tl.load(at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(at + half, mask=turns, other=0.0).to(tl.float32)
        turned = own * cos + tl.where(first, -other, other) * sin
        own = tl.where(turns, turned, own)
    tl.store(out + row + d, rounded(own, q.dtype.element_ty).to(tl.float32), mask=d < D)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.predict.rms_norm`; x [B, C]."""
    B, C = x.shape
    out = torch.empty_like(x)
    if B:
        norm_kernel[(B,)](x, weight, out, eps, C, triton.next_power_of_2(C), num_warps=8)
    return out


def predict_query(
    x,
    norm_weight,
    norm_eps,
    w_q,
    b_q,
    q_norm_weight,
    q_norm_eps,
    cos_sin,
    positions,
    rotary_dim,
    is_neox,
    HQ,
    D,
):
    """See `ops.predict.predict_query`."""
    q = torch.nn.functional.linear(rms_norm(x, norm_weight, norm_eps), w_q, b_q)
    B = q.shape[0]
    out = q.new_empty((B, HQ, D), dtype=torch.float32)
    if B:
        rotate_kernel[(B, HQ)](
            q, q_norm_weight, cos_sin, positions, out, q_norm_eps, HQ, D,
            rotary_dim if cos_sin is not None else 0, is_neox, q_norm_weight is not None,
            triton.next_power_of_2(D), num_warps=1,
        )  # fmt: skip
    return out
