"""`merge_states` on the device.

Memory traffic: 12 D + 12 bytes per query head. The second part may be in pinned host memory.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def merge_rows(out_a, lse_a, out_b, lse_b):
    """Merge two parts of the same rows: out [R, D] and lse [R]. If one is empty, exactly the other."""
    gap = lse_b - lse_a
    weight = tl.where(gap == gap, 1.0 / (1.0 + tl.exp(-gap)), 0.0)[:, None]  # both empty: NaN
    step = out_b - out_a
    out = tl.where(weight < 0.5, out_a + weight * step, out_b - (1.0 - weight) * step)
    top = tl.maximum(lse_a, lse_b)
    small = tl.exp(-tl.abs(gap))
    # log1p(x), accurate for small x.
    grown = 1.0 + small
    extra = tl.where(grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0)))
    return out, tl.where(gap == gap, top + extra, top)


@triton.jit
def merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    rows,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of rows. out_a, out_b, out [rows, D]; lse_a, lse_b, lse [rows]."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    mask = (r < rows)[:, None] & (d < D)[None, :]
    # [BLOCK_R, BLOCK_D] and [BLOCK_R]
    merged, total = merge_rows(
        tl.load(out_a + at, mask=mask, other=0.0),
        tl.load(lse_a + r, mask=r < rows, other=0.0),
        tl.load(out_b + at, mask=mask, other=0.0),
        tl.load(lse_b + r, mask=r < rows, other=0.0),
    )
    tl.store(out + at, merged, mask=mask)
    tl.store(lse + r, total, mask=r < rows)


def merge_states(out_a, lse_a, out_b, lse_b):
    """See `ops.merge.merge_states`."""
    B, HQ, D = out_a.shape
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if out_a.numel() == 0:
        return out, lse
    block_d = triton.next_power_of_2(D)
    block_r = max(1, 1024 // block_d)
    merge_kernel[(triton.cdiv(B * HQ, block_r),)](
        out_a, lse_a, out_b, lse_b, out, lse, B * HQ, D, block_r, block_d, num_warps=4
    )
    return out, lse
