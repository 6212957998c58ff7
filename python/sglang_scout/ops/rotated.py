"""Page digests of one or two bits per key element, in coordinates in which few bits say much.

Stored are the page's mean key, and for every token the difference of its key from the mean.

    x_t = R k_t                  q . k = R' q . R k
    m   = mean_t x_t, in int8    with one step per page and KV head

Two bits per channel: R = R' is sign flips, then Hadamard transforms, which even out the channels:

    s_t = rms(x_t - m)           the scale of a token, in bfloat16
    x_t ~ m + s_t (FIRST b1 + SECOND b2)
    b1  = +-1, the sign of x_t - m; b2 = b1 where |x_t - m| > FIRST s_t, else -b1

These levels minimize the squared error for a normal variable (Max 1960), which rotated channels nearly are (QuIP,
RaBitQ).

One bit per channel on average: R and R' are calibrated (:class:`Coordinates`) so that errors of all channels of x
matter equally to queries, and channels that vary more have more bits: none to four.

    s_t = |gain (x_t - m)|                     over the bits
    x_t ~ m + s_t sum of width b               over a channel's bits, b = +-1: equidistant levels

Also stored is the norm of each token's value: what a page's tokens add to the output is at most

    sum_t w_t |v_t|              |v_t| in uint8, with one step per page and KV head

Elements of K and V are clamped and NaN becomes 0, as by `embed.limited`: digests and scores are finite.

Layout of a page and KV head, in two tensors:
    planes  [bits, 16, D / 4]  each byte holds four channels of token t (low nibble) and token 16 + t (high nibble)
    stats   [D + 112]          m in int8 [D]; s in bfloat16 [32]; the steps of m and of |v| in float32; |v| in uint8
                               [32]; 8 bytes of zero
"""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import torch

from .. import _native
from ..core.page_bytes import ROTATED_STATS_BYTES as STATS_BYTES
from . import triton
from .digest import given_rows, same_rows
from .embed import limited
from .layers import KV_DTYPE_NAMES, LayerPages, source_rows
from .op import Call, Tolerance, op
from .score import reduce_heads

PAGE_TOKENS = 32
FIRST, SECOND = 0.98160, 0.52880
FLIP = 0x9E3779B1
"""Channel d is negated where bit 31 of (d + 1) times this is set."""

BUILD_TOLERANCES = dict.fromkeys(
    KV_DTYPE_NAMES, Tolerance(0.0, 0.0, "compared by what is stored: see the tests of building")
)
_REASON = (
    "queries may be rounded to 8 bits of the largest sum of eight channels (C++), an error of up to 0.6 % of the "
    "largest scores of random queries"
)
TOLERANCES = dict.fromkeys(KV_DTYPE_NAMES, Tolerance(2e-2, 6e-3, _REASON))


class Coordinates(NamedTuple):
    """Calibrated coordinates of a layer's KV heads, or with an axis before of all layers.

    keys, queries: [H, D, D] float32, R and R'; the one is the inverse of the other, transposed.
    bits: [H, 4, D] float32, for each of D bits: its channel; its width; 1, 2, 4 or 8 by the number of wider bits of the
        channel; the channel's gain.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    bits: torch.Tensor


_OfLayer = Annotated[Coordinates | None, ("H D D float32", "H D D float32", "H 4 D float32")]
_OfLayers = Annotated[Coordinates | None, ("L H D D float32", "L H D D float32", "L H 4 D float32")]


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


def planes_shape(bits: int, D: int) -> tuple[int, int, int]:
    """Shape of ``planes`` for one page and KV head, uint8."""
    return bits, PAGE_TOKENS // 2, D // 4


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


def rotate(x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    """R x for ``x`` [..., D] float32, D a multiple of 16; with R ``by`` [H, D, D] for ``x`` [..., H, M, D]."""
    return x @ (_rotation(x.shape[-1], x.device) if by is None else by.mT)


def decode(
    planes: torch.Tensor, stats: torch.Tensor, coordinates: Coordinates | None = None
) -> torch.Tensor:
    """Dequantized x, [n, H, 32, D] float32, from digests [n, H, bits, 16, D / 4] and [n, H, D + 112]."""
    D = 4 * planes.shape[-1]
    # Copied for alignment to their dtypes.
    mean = stats[..., :D].contiguous().view(torch.int8).float()
    scale = stats[..., D : D + 64].contiguous().view(torch.bfloat16).float()
    step = stats[..., D + 64 : D + 68].contiguous().view(torch.float32)
    bits = _unpacked(planes)  # [n, H, bits, 32, D]
    if coordinates is None:
        level = bits[:, :, 0] * FIRST + bits[:, :, 1] * SECOND
    else:
        channel, width = coordinates.bits[:, 0].long(), coordinates.bits[:, 1]
        part = bits[:, :, 0] * width[:, None]
        level = torch.zeros_like(part).scatter_add_(-1, channel[:, None].expand_as(part), part)
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


def _valid_digests(call: Call) -> str:
    D = call.sizes["D"]
    for name, size in {"C": D // 4, "T": D + STATS_BYTES}.items():
        if call.sizes[name] != size:
            return f"{name}={call.sizes[name]}, expected {size}"
    bits = call.sizes["bits"]
    fits = bits == (2 if call["coordinates"] is None else 1)
    return "" if fits else f"planes has {bits} bits, expected 2, or 1 with coordinates"


def _valid_build(call: Call) -> str:
    return _valid_digests(call) or same_rows(call)


@op(_valid_build, tolerances=BUILD_TOLERANCES)
def build_layer_rotated(
    source: Annotated[LayerPages, "L R 32 H D kv"],
    ids: Annotated[torch.Tensor, "n int64"],
    planes: Annotated[torch.Tensor, "L P H bits 16 C uint8"],
    stats: Annotated[torch.Tensor, "L P H T uint8"],
    rows: Annotated[torch.Tensor | None, "L n int64"] = None,
    coordinates: _OfLayers = None,
) -> None:
    """Write the digests of pages ``ids`` in every layer; all other rows are unchanged. One launch.

    Args:
        source, ids, rows: as in `build_layer_digests`, with V. D a multiple of 16.
        planes, stats: see the module docstring; 2 bits, 1 with coordinates; mutated.
        coordinates: of all layers.
    """
    of_keys, of_values = (source_rows(x, ids, rows) for x in (source.k, source.v))
    for layer, parts in enumerate(zip(of_keys, of_values, strict=True)):
        # [n, H, 32, D]
        k, v = (limited(x.to(planes.device)).transpose(1, 2) for x in parts)
        of_layer = coordinates and Coordinates(*(part[layer] for part in coordinates))
        x = rotate(k, of_layer and of_layer.keys)
        mean, step = _steps(x.mean(2), 127)
        norms, norm_step = _steps(v.norm(dim=-1), 255)
        x = x - (mean * step)[:, :, None]
        if of_layer is None:
            scale = x.square().mean(-1).sqrt()  # [n, H, 32]
            first = x >= 0
            bits = [first, first == (x.abs() > FIRST * scale[..., None])]
        else:
            channel, width, levels, gain = of_layer.bits[:, None].unbind(2)  # [H, 1, D]
            x = x.gather(-1, channel.long().expand(len(x), -1, PAGE_TOKENS, -1))
            scale = (x * gain).square().sum(-1).sqrt()
            tiny = torch.finfo(torch.float32).tiny
            level = (x / (2 * width * scale[..., None]).clamp(min=tiny)).floor()
            bits = [(level.clamp(-levels, levels - 1) + levels) % 2 == 1]
        planes[layer].index_copy_(0, ids, torch.stack([_packed(b) for b in bits], 2))
        zero = step.new_zeros(*step.shape[:2], 2)
        stored = mean.to(torch.int8), scale.bfloat16(), step, norm_step, norms.to(torch.uint8), zero
        row = torch.cat([part.contiguous().view(torch.uint8) for part in stored], -1)
        stats[layer].index_copy_(0, ids, row)


def page_masses(
    q: torch.Tensor,
    planes: torch.Tensor,
    stats: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    coordinates: Coordinates | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """u[h, p] = log sum_t exp(scale R' q[h] . x_t), the estimated log softmax mass of the page, and the mean of |v_t|
    under that softmax, both [B, HQ, N]."""
    (B, N), H = table.shape, planes.shape[1]
    ids = table.clamp(min=0).flatten()
    digests = planes.index_select(0, ids), stats.index_select(0, ids)
    keys = decode(*digests, coordinates)  # [B * N, H, 32, D]
    norms = value_norms(digests[1]).view(B, N, H, PAGE_TOKENS)
    q = q.view(B, H, q.shape[1] // H, q.shape[2]) * scale
    q = rotate(q, coordinates and coordinates.queries)
    logits = torch.einsum("bhgd,bnhtd->bhgnt", q, keys.view(B, N, *keys.shape[1:]))
    means = torch.einsum("bhgnt,bnht->bhgn", logits.softmax(-1), norms)
    return logits.logsumexp(-1).flatten(1, 2), means.flatten(1, 2)


@op(_valid_digests, tolerances=TOLERANCES)
def score_rotated(
    q: Annotated[torch.Tensor, "B H*G D query"],
    planes: Annotated[torch.Tensor, "P H bits 16 C uint8"],
    stats: Annotated[torch.Tensor, "P H T uint8"],
    table: Annotated[torch.Tensor, "B N int32"],
    n_full: Annotated[torch.Tensor, "B int32"],
    scale: float,
    coordinates: _OfLayer = None,
) -> torch.Tensor:
    """Score every full page of every request against its (predicted) query.

        u[h, p] = log sum_t exp(scale R' q[h] . x_t)       the estimated log softmax mass of the page

    and u is reduced over heads as in `score_pages`, except that each token is weighted by the norm of its value: summed
    is sum_t w[h, t] |v_t|, an upper bound on what head h's output loses without the page.

    Args:
        q: after RoPE.
        planes, stats: of one layer, see `build_layer_rotated`.
        table, n_full, scale: as in `score_pages`.
        coordinates: of this layer, for digests built with them.
    Returns:
        [B, N] float32; -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: codes as in RaBitQ (arXiv 2405.12497) and QuIP (arXiv 2307.13304); norms of values as in VATP (arXiv
        2406.12335); combining them into a page score: ours.
    """
    masses, means = page_masses(q.float(), planes, stats, table, scale, coordinates)
    return reduce_heads(masses, table, n_full, means)


_NATIVE_DIMS = {"D": range(16, 1025, 16)}  # sums over larger heads would overflow 16 bits


@build_layer_rotated.native(sizes=_NATIVE_DIMS, unless=given_rows)
def _build_layer_rotated_native(source, ids, planes, stats, rows, coordinates):
    turn, _, bits = coordinates or (None,) * 3
    _native.rotate_layers(source.k, source.v, ids, planes, stats, turn, bits)


build_layer_rotated.triton("rotate", sizes=triton.HEAD_DIMS)


def _scored(log_masses, out_shape, q, planes, stats, table, n_full, scale, coordinates):
    _, turn, bits = coordinates or (None,) * 3
    out, threads = q.new_empty(out_shape, dtype=torch.float32), torch.get_num_threads()
    of_pages = planes, stats, table, n_full, scale, log_masses
    _native.score_rotated(q.float(), *of_pages, turn, bits, out, threads)
    return out


@score_rotated.native(sizes=_NATIVE_DIMS)
def _score_rotated_native(q, planes, stats, table, n_full, scale, coordinates):
    return _scored(False, table.shape, q, planes, stats, table, n_full, scale, coordinates)


score_rotated.triton("rotated", sizes=triton.HEAD_DIMS)


def _valid_lists(call: Call) -> str:
    lists, heads = call.sizes["lists"], call.sizes["H"]
    if lists > 1 and call["coordinates"] is not None:
        return f"pages has {lists} lists per request, expected 1 with coordinates"
    if lists not in (1, heads):
        return f"pages has {lists} lists per request, expected 1 or H={heads}"
    return _valid_digests(call)


def _of_lists(
    pages: torch.Tensor, planes: torch.Tensor, stats: torch.Tensor, lists: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With one list per KV head, view each (page, head) as a page of one head, so that a list reads its head only."""
    if lists == 1:
        return planes, stats, pages
    head = torch.arange(lists, dtype=torch.int32, device=pages.device)[:, None]
    rows = (pages.unflatten(0, (-1, lists)) * lists + head).flatten(0, 1)
    return planes.flatten(0, 1).unsqueeze(1), stats.flatten(0, 1).unsqueeze(1), rows


@op(_valid_lists, tolerances=TOLERANCES)
def mass_change_rotated(
    q: Annotated[torch.Tensor, "B H*G D query"],
    q_ahead: Annotated[torch.Tensor, "B H*G D query"],
    planes: Annotated[torch.Tensor, "P H bits 16 C uint8"],
    stats: Annotated[torch.Tensor, "P H T uint8"],
    pages: Annotated[torch.Tensor, "B*lists N int32"],
    n_pages: Annotated[torch.Tensor, "B*lists int32"],
    scale: float,
    coordinates: _OfLayer = None,
) -> torch.Tensor:
    """Estimate the difference in log softmax mass of the given pages between two queries: m(q) - m(q_ahead) with

        m[h](q) = log sum_p sum_t exp(scale R' q[h] . x_t[p])

    Args:
        planes, stats, scale, coordinates: as in `score_rotated`.
        pages, n_pages: the first n_pages of each row; negative ones are padding. With H lists per request, row
            b * H + h belongs to KV head h of request b.
    Returns:
        [B, HQ] float32; 0 for a row without pages, and where the difference is not finite.
    """
    lists = len(pages) // len(q) if len(q) else 1
    planes, stats, rows = _of_lists(pages, planes, stats, lists)
    size = len(rows), q.shape[1] // lists, q.shape[2]
    void = (torch.arange(rows.shape[1], device=rows.device) >= n_pages[:, None]) | (rows < 0)
    real, ahead = (
        page_masses(x.float().view(size), planes, stats, rows, scale, coordinates)[0]
        .masked_fill_(void[:, None], -torch.inf)
        .logsumexp(-1)
        for x in (q, q_ahead)
    )
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])


@mass_change_rotated.native(sizes=_NATIVE_DIMS)
def _mass_change_rotated_native(q, q_ahead, planes, stats, pages, n_pages, scale, coordinates):
    lists = len(pages) // len(q) if len(q) else 1
    planes, stats, rows = _of_lists(pages, planes, stats, lists)
    size = len(rows), q.shape[1] // lists, q.shape[2]
    of_pages = planes, stats, rows, n_pages, scale, coordinates
    real, ahead = (_scored(True, size[:2], x.view(size), *of_pages) for x in (q, q_ahead))
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])


mass_change_rotated.triton("rotated", sizes=triton.HEAD_DIMS)
