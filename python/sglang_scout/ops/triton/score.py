"""`score_pages` on the device, in one launch: a row's softmax over all its pages needs all its bounds, so the last
program of a row to finish reduces them. A separate launch would cost about as much. The bounds, 4 HQ bytes per page,
stay in the L2 cache (40 heads, 2,048 pages, batch 16: 5 MiB)."""

import torch
import triton
import triton.language as tl

from .attend import MAX_ROWS, arrivals_of, processors, programs_per_row
from .common import dot_16, finite

# Pages per iteration, fewer for large heads.
_BLOCK_PAGES, _BLOCK_VALUES = 64, 8192
PER_SM = 4  # programs that an H100's SM holds; test_triton_compile.py
# Parts, heads and pages per iteration of the reduction. A thread has all heads of its pages: no exchange in between.
_PARTS, _HEADS, _REDUCED_PAGES = tl.constexpr(16), tl.constexpr(4), 512
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_mass(top, mass, u, AXIS: tl.constexpr):
    """Online softmax: running maximum of u and sum of e^(u - maximum), for each head."""
    largest = tl.maximum(top, tl.max(u, axis=AXIS))
    base = finite(largest)
    mass = mass * tl.exp(top - base)
    return largest, mass + tl.sum(tl.exp(u - tl.expand_dims(base, AXIS)), axis=AXIS)


@triton.jit
def reduce_row(
    u, tops, masses, table, out, b, full, N, row_stride, parts,
    HQ: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Scores of a row's pages, reduced over heads; see `ops.minmax`. u [B, HQ, row_stride]; tops, masses
    [B, HQ, parts]; out [B, N]."""
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HQ)
    h = tl.arange(0, BLOCK_H)
    head = b * HQ + h
    base = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, parts, _PARTS):
        part = first + tl.arange(0, _PARTS)
        known = (h < HQ)[:, None] & (part < parts)[None, :]
        at = head[:, None] * parts + part[None, :]
        # [BLOCK_H, _PARTS]
        top = tl.load(tops + at, mask=known, other=float("-inf"))
        mass = tl.load(masses + at, mask=known, other=0.0)
        largest = tl.maximum(base, tl.max(top, axis=1))
        total *= tl.exp(base - finite(largest))
        total += tl.sum(mass * tl.exp(top - finite(largest)[:, None]), axis=1)
        base = largest
    total = tl.maximum(total, 1.0)
    tl.store(tops + head * parts, finite(base), mask=h < HQ)
    tl.store(masses + head * parts, 1 / total, mask=h < HQ)
    tl.debug_barrier()
    i, j = tl.arange(0, BLOCK_N), tl.arange(0, _HEADS)
    table += b.to(tl.int64) * N
    out += b.to(tl.int64) * N
    for first in range(0, full, BLOCK_N):
        n = first + i
        score = tl.zeros([BLOCK_N], tl.float32)
        for some in tl.range(0, HQ, _HEADS, num_stages=3):
            at, known = (b * HQ + some + j)[:, None], (some + j < HQ)[:, None]
            most = tl.load(tops + at * parts, mask=known, other=0.0)
            share = tl.load(masses + at * parts, mask=known, other=0.0)
            # [_HEADS, BLOCK_N], in 16-byte words: what stands at pages that are not offered is not used.
            here = known & (n < row_stride)[None, :]
            x = tl.load(
                u + at.to(tl.int64) * row_stride + n[None, :], mask=here, other=float("-inf")
            )
            # Not u - lse: if bounds are large, rounding lse would lose the digits that matter.
            x -= most
            score += tl.sum(tl.exp2(x * _LOG2_E) * share, axis=0)
        offered = tl.load(table + n, mask=n < full, other=-1) >= 0
        tl.store(out + n, tl.where(offered, score, float("-inf")), mask=n < N)
    for first in range(tl.cdiv(full, BLOCK_N) * BLOCK_N, N, BLOCK_N):
        void = tl.full([BLOCK_N], float("-inf"), tl.float32)
        tl.store(out + first + i, void, mask=first + i < N)


@triton.jit
def reduce_when_last(
    arrivals, u, tops, masses, table, out, b, full, N, row_stride, parts,
    H: tl.constexpr, HQ: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """`reduce_row` by the last to arrive of a row's H * parts programs. arrivals [B]: 0 before and after."""
    tl.debug_barrier()  # orders the atomic of thread 0 after all stores of the program
    if tl.atomic_add(arrivals + b, 1, sem="acq_rel") == H * parts - 1:
        tl.store(arrivals + b, 0)
        reduce_row(u, tops, masses, table, out, b, full, N, row_stride, parts, HQ, BLOCK_R)


@triton.jit(do_not_specialize=["parts"])  # one part would take another third of registers
def bounds_kernel(
    q, kmin, kmax, table, n_full, arrivals, bounds, tops, masses, out,
    scale, N, row_stride, parts,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Bounds of every parts-th block of pages for the G query heads of one KV head: u = q+ . M + q- . m. Also stores
    the part's largest bound and sum of e^(u - largest). q [B, HQ, D]; kmin, kmax [P, H, D]; table [B, N]; arrivals to
    out: see `reduce_when_last`."""
    BLOCK_G: tl.constexpr = max(16, triton.next_power_of_2(G))
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = (b * H + h) * G + g  # row of [B * HQ]
    full = tl.minimum(tl.load(n_full + b), N)
    # [BLOCK_G, BLOCK_D]
    own = (g < G)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + head[:, None] * D + d[None, :], mask=own, other=0.0).to(tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for block in range(part, tl.cdiv(full, BLOCK_N), parts):
        # [BLOCK_N]
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
        offered = page >= 0
        at = (page.to(tl.int64) * H + h)[:, None] * D + d[None, :]
        here = offered[:, None] & (d < D)[None, :]
        # [BLOCK_N, BLOCK_D]
        low = tl.load(kmin + at, mask=here, other=0.0)
        high = tl.load(kmax + at, mask=here, other=0.0)
        # [BLOCK_G, BLOCK_N]
        u = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
        u = dot_16(tl.maximum(q_tile, 0.0), tl.trans(high), u)
        u = dot_16(tl.minimum(q_tile, 0.0), tl.trans(low), u) * scale
        u = tl.where(offered[None, :], u, float("-inf"))
        at_bound = bounds + head.to(tl.int64)[:, None] * row_stride + n[None, :]
        tl.store(at_bound, u, mask=(g < G)[:, None])
        top, mass = add_mass(top, mass, u, 1)
    tl.store(tops + head * parts + part, top, mask=g < G)
    tl.store(masses + head * parts + part, mass, mask=g < G)
    reduce_when_last(
        arrivals, bounds, tops, masses, table, out, b, full, N, row_stride, parts, H, H * G, BLOCK_R
    )


def parts_of(rows: int, blocks: int, slots: int) -> int:
    """`programs_per_row` of scoring. A program's start and end, some 2 us, count as half a block."""
    return programs_per_row(rows, blocks, slots, range(1, blocks + 1), 0.5)


def reduction(q: torch.Tensor, table: torch.Tensor, parts: int, block_pages: int) -> list[torch.Tensor]:
    """The arguments of `reduce_when_last` from ``arrivals`` to ``out``, without ``table``: u of each head and page, and
    of each part the maximum and the sum of e^(u - maximum)."""
    (B, N), HQ = table.shape, q.shape[1]
    arrivals = arrivals_of("score", q.device) if B <= MAX_ROWS else table.new_zeros(B)
    row_stride = block_pages * triton.cdiv(N, block_pages)
    u = q.new_empty((B, HQ, row_stride), dtype=torch.float32)
    return [arrivals, u, *u.new_empty((2, B, HQ, parts)).unbind(), u.new_empty((B, N))]


def reduced_pages(N: int) -> int:
    """BLOCK_N of `reduce_row`."""
    return max(16, min(_REDUCED_PAGES, triton.next_power_of_2(N)))


def score_pages(q, kmin, kmax, table, n_full, scale):
    (B, N), (_, H, D) = table.shape, kmin.shape
    if B * N == 0:
        return q.new_empty((B, N), dtype=torch.float32)
    most = min(_BLOCK_PAGES, _BLOCK_VALUES // triton.next_power_of_2(D))
    block_n = min(most, max(16, triton.next_power_of_2(N)))
    parts = parts_of(B * H, triton.cdiv(N, block_n), PER_SM * processors(table.device))
    buffers = reduction(q, table, parts, block_n)
    bounds_kernel[(parts, H, B)](
        q, kmin, kmax, table, n_full, *buffers, scale, N, buffers[1].shape[2], parts,
        H, q.shape[1] // H, D, block_n, reduced_pages(N), num_warps=4,
    )
    return buffers[-1]
