"""Page digests of two bits per key element, rotated first: R is sign flips, then Hadamard transforms, which even out
the channels. Stored are the page's mean key, and for every token the difference of its key from the mean.

    x_t = R k_t                  q . k = R q . R k
    m   = mean_t x_t, in int8    with one step per page and KV head
    s_t = rms(x_t - m)           the scale of a token, in bfloat16
    x_t ~ m + s_t (FIRST b1 + SECOND b2)
    b1  = +-1, the sign of x_t - m; b2 = b1 where |x_t - m| > FIRST s_t, else -b1

These levels minimize the squared error for a normal variable (Max 1960), which rotated channels nearly are (QuIP,
RaBitQ).

Also stored is the norm of each token's value: what a page's tokens add to the output is at most

    sum_t w_t |v_t|              |v_t| in uint8, with one step per page and KV head

Elements of K and V are clamped and NaN becomes 0, as by `layers.limited`: digests and scores are finite.

Layout of a page and KV head, in two tensors:
    planes  [2, 16, D / 4]     each byte holds four channels of token t (low nibble) and token 16 + t (high nibble)
    stats   [D + 112]          m in int8 [D]; s in bfloat16 [32]; the steps of m and of |v| in float32; |v| in uint8
                               [32]; 8 bytes of zero
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from .. import _native
from . import triton as kernels
from .layers import LayerPages, limited, source_rows

PAGE_TOKENS = 32
STATS_BYTES = 112
"""Besides D bytes of mean, see above."""

FIRST, SECOND = 0.98160, 0.52880
FLIP = 0x9E3779B1
"""Channel d is negated where bit 31 of (d + 1) times this is set."""


def hadamard(D: int) -> torch.Tensor:
    """[D, D] float32, symmetric and orthogonal. D is a power of two."""
    turn = torch.ones(1, 1)
    while len(turn) < D:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return turn * D**-0.5


@functools.cache
def _rotation(D: int, device: torch.device) -> torch.Tensor:
    """[D, D] float32, R transposed. Block-diagonal Hadamard transforms of the largest power of two that divides D."""
    width = D & -D
    flips = 1 - 2 * (((torch.arange(D) + 1) * FLIP >> 31) & 1)
    whole = torch.block_diag(*[hadamard(width)] * (D // width)) * flips
    return whole.T.contiguous().to(device)


def planes_shape(D: int) -> tuple[int, int, int]:
    """Shape of ``planes`` for one page and KV head, uint8."""
    return 2, PAGE_TOKENS // 2, D // 4


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """[..., 32, D] bool -> [..., 16, D / 4] uint8."""
    # [..., 16, D / 4, 2, 4]
    halves = bits.unflatten(-1, (-1, 4)).unflatten(-3, (2, -1)).movedim(-4, -2)
    place = 1 << torch.arange(8, dtype=torch.int32, device=bits.device).view(2, 4)
    return (halves * place).sum((-2, -1)).to(torch.uint8)


def _unpacked(planes: torch.Tensor) -> torch.Tensor:
    """[..., 16, D / 4] uint8 -> [..., 32, D] float32, +1 or -1."""
    place = torch.arange(8, dtype=torch.int32, device=planes.device)
    bits = (planes[..., None].int() >> place) & 1  # [..., 16, D / 4, 8]
    halves = bits.unflatten(-1, (2, 4)).movedim(-2, -4)  # [..., 2, 16, D / 4, 4]
    return halves.flatten(-2).flatten(-3, -2).float() * 2 - 1


def rotate(x: torch.Tensor) -> torch.Tensor:
    """R x for ``x`` [..., D] float32, D a multiple of 16."""
    return x @ _rotation(x.shape[-1], x.device)


def decode(planes: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Dequantized x, [n, H, 32, D] float32, from digests [n, H, 2, 16, D / 4] and [n, H, D + 112]."""
    D = 4 * planes.shape[-1]
    # Copied for alignment to their dtypes.
    mean = stats[..., :D].contiguous().view(torch.int8).float()
    scale = stats[..., D : D + 64].contiguous().view(torch.bfloat16).float()
    step = stats[..., D + 64 : D + 68].contiguous().view(torch.float32)
    first, second = _unpacked(planes).unbind(2)  # [n, H, 32, D]
    level = first * FIRST + second * SECOND
    return (mean * step)[:, :, None] + scale[..., None] * level


def value_norms(stats: torch.Tensor) -> torch.Tensor:
    """Dequantized norms of the values, [n, H, 32] float32, from digests [n, H, D + 112]."""
    end = stats.shape[-1] - 8
    step = stats[..., end - 36 : end - 32].contiguous().view(torch.float32)
    return stats[..., end - 32 : end].float() * step


def _steps(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [..., n] quantized to whole steps, and the step [..., 1]: the largest magnitude is ``levels`` steps."""
    step = (x.abs().amax(-1, keepdim=True) / levels).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / step).round(), step


def build_layer_rotated(
    source: LayerPages,
    ids: Int64[Tensor, " n"],
    planes: UInt8[Tensor, "L P H 2 16 C"],
    stats: UInt8[Tensor, "L P H 4*C+112"],
    rows: Int64[Tensor, "L n"] | None = None,
) -> None:
    """Write the digests of pages ``ids`` in every layer; all other rows are unchanged. One launch.

    Args:
        source, ids, rows: as in `build_layer_digests`, with V. D a multiple of 16.
        planes, stats: see the module docstring; mutated.
    """
    if planes.is_cuda:
        run = kernels.rotated.build_layer_rotated
    else:  # C++ reads host pages, whose rows are their ids
        run = _build_layer_rotated_native if rows is None else build_layer_rotated_reference
    run(source, ids, planes, stats, rows)


def build_layer_rotated_reference(source, ids, planes, stats, rows=None):
    of_keys, of_values = (source_rows(x, ids, rows) for x in (source.k, source.v))
    for layer, parts in enumerate(zip(of_keys, of_values, strict=True)):
        # [n, H, 32, D]
        k, v = (limited(x.to(planes.device)).transpose(1, 2) for x in parts)
        x = rotate(k)
        mean, step = _steps(x.mean(2), 127)
        norms, norm_step = _steps(v.norm(dim=-1), 255)
        x = x - (mean * step)[:, :, None]
        scale = x.square().mean(-1).sqrt()  # [n, H, 32]
        first = x >= 0
        bits = first, first == (x.abs() > FIRST * scale[..., None])
        planes[layer].index_copy_(0, ids, torch.stack([_packed(b) for b in bits], 2))
        zero = step.new_zeros(*step.shape[:2], 2)
        stored = mean.to(torch.int8), scale.bfloat16(), step, norm_step, norms.to(torch.uint8), zero
        row = torch.cat([part.contiguous().view(torch.uint8) for part in stored], -1)
        stats[layer].index_copy_(0, ids, row)


def _build_layer_rotated_native(source, ids, planes, stats, rows=None):
    _native.rotate_layers(source.k, source.v, ids, planes, stats)
