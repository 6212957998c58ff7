"""`mass_change_rotated` on the device: one launch.

Memory traffic, with b bits: 4 D b + D + 112 bytes per missing page and KV head, for both queries at once.
"""

import torch
import triton
import triton.language as tl

from .rotated import LOG2_E, block_sums, query_digits
from .score import add_mass

_BLOCK_PAGES = 16  # small, as few pages are missing


@triton.jit
def mass_kernel(
    q, q_ahead, planes, means, scales, pages, n_pages, change, turn, bits,
    scale, N,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The G query heads of one KV head. The real and the predicted (layer-ahead) queries are rows of one operand, so
    that every digest is read once.

    q, q_ahead [B, HQ, D]; planes, means, scales: see `rotated.rotated_sums_kernel`; pages [B * C, N]; n_pages [B * C];
    change [B, HQ]; turn, bits: see `rotated.query_digits_kernel`.
    """
    h, b = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, BLOCK_G)
    head = (b * H + h) * G + g
    of = b * C + h % C
    count = tl.minimum(tl.load(n_pages + of), N)
    differ = tl.zeros([BLOCK_G], tl.float32)
    if count > 0:
        i = tl.arange(0, 2 * BLOCK_G)
        of_group = i % BLOCK_G
        to_ahead = q_ahead.to(tl.int64) - q.to(tl.int64)
        to_ahead = to_ahead // (q.dtype.element_ty.primitive_bitwidth // 8)
        row = ((b * H + h) * G + of_group) * D + tl.where(i < BLOCK_G, 0, to_ahead)
        if turn is not None:
            turn += h * D * D
            bits += h * 4 * D
        of_mean, first, second, unit, of_planes, total = query_digits(
            q, row, of_group < G, turn, bits, scale, D, BLOCK_D
        )
        top = tl.full([2 * BLOCK_G], float("-inf"), tl.float32)
        mass = tl.zeros([2 * BLOCK_G], tl.float32)
        for begin in range(0, count, BLOCK_N):
            n = begin + tl.arange(0, BLOCK_N)
            # [BLOCK_N]
            page = tl.load(pages + of.to(tl.int64) * N + n, mask=n < count, other=-1)
            # [BLOCK_N, 2 BLOCK_G]
            u, _ = block_sums(
                of_mean, first, second, unit, of_planes, total, planes, means, scales,
                page.to(tl.int64) * H + h, page >= 0, D, BITS, BLOCK_D, False,
            )  # fmt: skip
            top, mass = add_mass(top, mass, u, 0)
        both = tl.reshape(top + tl.log(mass), (2, BLOCK_G))
        real, ahead = tl.split(tl.trans(both))
        differ = real - ahead
        differ = tl.where(tl.abs(differ) < float("inf"), differ, 0.0)
    tl.store(change + head, differ, mask=g < G)


def mass_change_rotated(q, q_ahead, planes, stats, pages, n_pages, scale, coordinates):
    """See `ops.mass.mass_change_rotated`."""
    (B, HQ, D), (_, H, bits) = q.shape, planes.shape[:3]
    change = q.new_empty((B, HQ), dtype=torch.float32)
    if B == 0:
        return change
    G, block_d = HQ // H, max(32, triton.next_power_of_2(D))
    block_g = max(8, triton.next_power_of_2(G))
    turn, of_bits = coordinates[1:] if coordinates else (None, None)
    mass_kernel[(H, B)](
        q, q_ahead, planes.view(torch.int32), stats.view(torch.int8), stats.view(torch.int32),
        pages, n_pages, change, turn, of_bits, scale * LOG2_E, pages.shape[1], H, G, D, bits,
        len(pages) // B, _BLOCK_PAGES, block_g, block_d, num_warps=4,
    )  # fmt: skip
    return change
