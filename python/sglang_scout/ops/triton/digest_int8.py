"""`build_layer_digests_int8` and `score_pages_int8` on the device.

Bytes that must move: a score reads 2 H D + H D / 8 per offered page and row, 53 % of what bfloat16
digests take, and 8 for id and score; building a page's digest reads S H D e and writes what a score
reads.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..layers import LayerPages
from .exact import dot_fp32, rounded
from .pages import layer_pointer, source_row
from .score import Scratch, leave_bounds, leave_nothing

if TYPE_CHECKING:
    from ..digest_int8 import Int8Digests

_BLOCK_PAGES = 64
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def coded(bound, good, DIRECTION: tl.constexpr, STEPS: tl.constexpr, LEAST_STEP: tl.constexpr):
    """Codes [groups, channels] of bounds, rounded down (-1) or up (1), and the bits of their steps."""
    x = tl.where(good[:, None], bound, 0.0) * DIRECTION
    width = tl.maximum(tl.max(tl.abs(x), axis=1) * STEPS, LEAST_STEP)
    bits = (width.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000  # up to the next bfloat16
    wide = bits.to(tl.float32, bitcast=True)[:, None] + tl.zeros_like(x)
    code = tl.ceil(tl.div_rn(x, wide))
    return (code * DIRECTION).to(tl.int8), (bits >> 16).to(tl.int16)


@triton.jit
def build_kernel(
    addresses,
    ids,
    rows,
    low,
    low_step,
    high,
    high_step,
    P,
    R,
    NO_STEP: tl.constexpr,
    LEAST_STEP: tl.constexpr,
    STEPS: tl.constexpr,
    DTYPE: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One page, head and layer. addresses [L] of [R, S, H, D]; ids [n]; rows: see `source_row`; low, high
    [L, P, H, D]; low_step, high_step [L, P, H, D / GROUP] as int16."""
    page, h = tl.load(ids + tl.program_id(0)), tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    source = source_row(rows, page, layer)
    if (page >= 0) & (page < P) & (source >= 0) & (source < R):
        k = layer_pointer(addresses, layer, DTYPE, ALIGN)
        s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        mask = (s < S)[:, None] & (d < D)[None, :]
        at = ((source * S + s) * H + h)[:, None] * D + d[None, :]
        x = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
        sound = (x - x == 0.0).to(tl.int32)  # neither infinite nor NaN
        least = tl.min(tl.where(mask, x, float("inf")), axis=0)
        most = tl.max(tl.where(mask, x, float("-inf")), axis=0)
        groups: tl.constexpr = [BLOCK_D // GROUP, GROUP]
        good = tl.min(tl.reshape(tl.min(sound, axis=0), groups), axis=1) > 0
        row = (layer * P + page) * H + h
        group = tl.arange(0, BLOCK_D // GROUP)
        inside = group < D // GROUP
        at = row * D + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        step_at = row * (D // GROUP) + group
        least = tl.reshape(tl.where(d < D, least, 0.0), groups)
        codes, step = coded(least, good, -1.0, STEPS, LEAST_STEP)
        tl.store(low + at, codes, mask=inside[:, None])
        tl.store(low_step + step_at, tl.where(good, step, NO_STEP), mask=inside)
        most = tl.reshape(tl.where(d < D, most, 0.0), groups)
        codes, step = coded(most, good, 1.0, STEPS, LEAST_STEP)
        tl.store(high + at, codes, mask=inside[:, None])
        tl.store(high_step + step_at, tl.where(good, step, NO_STEP), mask=inside)


@triton.jit
def bounds_int8_kernel(
    q,
    low,
    low_step,
    high,
    high_step,
    table,
    n_full,
    bounds,
    block_top,
    block_mass,
    scale,
    N,
    row_stride,
    part_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """As `bounds_kernel`, group of channels by group: u = sum of step (q+ . high) + step (q- . low)."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = (b * H + h) * G + g
    full = tl.minimum(tl.load(n_full + b), N)
    if block * BLOCK_N < full:
        page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
        offered = page >= 0
        row = page.to(tl.int64) * H + h
        nothing = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
        u = nothing
        for c in tl.static_range(D // GROUP):
            d = c * GROUP + tl.arange(0, GROUP)
            q_part = tl.load(q + head[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
            q_part = q_part * scale
            at = row[:, None] * D + d[None, :]
            most = tl.load(high + at, mask=offered[:, None], other=0).to(tl.float32)
            least = tl.load(low + at, mask=offered[:, None], other=0).to(tl.float32)
            step_at = row * (D // GROUP) + c
            upper = dot_fp32(tl.maximum(q_part, 0.0), tl.trans(rounded(most, tl.bfloat16)), nothing)
            step = tl.load(high_step + step_at, mask=offered, other=0.0).to(tl.float32)
            u += upper * step[None, :]
            lower = dot_fp32(
                tl.minimum(q_part, 0.0), tl.trans(rounded(least, tl.bfloat16)), nothing
            )
            step = tl.load(low_step + step_at, mask=offered, other=0.0).to(tl.float32)
            u += lower * step[None, :]
        u = tl.where(offered[None, :], u, float("-inf"))
        leave_bounds(u, bounds, block_top, block_mass, head, n, g < G, row_stride, part_stride)
    else:
        leave_nothing(block_top, block_mass, head, g < G, part_stride, BLOCK_G)


def build_layer_digests_int8(
    source: LayerPages,
    ids: torch.Tensor,
    digests: "Int8Digests",
    rows: torch.Tensor | None = None,
) -> None:
    """See `ops.digest_int8.build_layer_digests_int8`."""
    from ..digest_int8 import GROUP, LEAST_STEP, NO_STEP_BITS, STEPS

    R, S, H, D = source.k[0].shape
    if ids.numel() == 0:
        return
    build_kernel[(ids.numel(), H, len(source.k))](
        source.addresses,
        ids,
        rows,
        digests.low,
        digests.low_step.view(torch.int16),
        digests.high,
        digests.high_step.view(torch.int16),
        digests.low.shape[1],
        R,
        NO_STEP_BITS,
        LEAST_STEP,
        STEPS,
        _DTYPES[source.k[0].dtype],
        S,
        H,
        D,
        GROUP,
        triton.next_power_of_2(S),
        triton.next_power_of_2(D),
        source.align_bytes,
        num_warps=4,
    )


def score_pages_int8(
    q: torch.Tensor,
    digests: "Int8Digests",
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.digest_int8.score_pages_int8`."""
    (B, N), (_, H, D), HQ = table.shape, digests.low.shape, q.shape[1]
    if out is None:
        out = q.new_empty((B, N))
    if B * N == 0:
        return out
    scratch = Scratch(q, table, _BLOCK_PAGES)
    G = HQ // H
    bounds_int8_kernel[(scratch.blocks, H, B)](
        q,
        *digests,
        table,
        n_full,
        *scratch.tensors,
        scale,
        N,
        scratch.row_stride,
        scratch.part_stride,
        H,
        G,
        D,
        D // digests.low_step.shape[2],
        scratch.block_n,
        max(16, triton.next_power_of_2(G)),
        num_warps=4,
    )
    scratch.reduce(table, n_full, out, reduce)
    return out
