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

Elements of K and V are clamped and NaN becomes 0, as by `pages.limited`: digests and scores are finite.

Layout of a page and KV head, in two tensors:
    planes  [2, 16, D / 4]     each byte holds four channels of token t (low nibble) and token 16 + t (high nibble)
    stats   [D + 112]          m in int8 [D]; s in bfloat16 [32]; the steps of m and of |v| in float32; |v| in uint8
                               [32]; 8 bytes of zero
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Float32, Int32, Int64, UInt8
from torch import Tensor

from .. import _native
from . import triton as kernels
from .minmax import reduce_heads
from .pages import LayerPages, limited, source_rows

PAGE_TOKENS = 32
STATS_BYTES = 112
"""Besides D bytes of mean, see above."""

FIRST, SECOND = 0.98160, 0.52880
FLIP = 0x9E3779B1
"""Channel d is negated where bit 31 of (d + 1) times this is set."""


@functools.cache
def _rotation(D: int, device: torch.device) -> torch.Tensor:
    """[D, D] float32, R transposed. Block-diagonal Hadamard transforms of the largest power of two that divides D."""
    block = torch.ones(1, 1)
    while D % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    flips = 1 - 2 * (((torch.arange(D) + 1) * FLIP >> 31) & 1)
    whole = torch.block_diag(*[block * len(block) ** -0.5] * (D // len(block))) * flips
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
    """Write the digests of pages ``ids`` in every layer, as `build_layer_digests`, with V; all other rows of ``planes``
    and ``stats`` are unchanged. One launch. D a multiple of 16."""
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


def page_masses(
    q: Tensor, planes: Tensor, stats: Tensor, table: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """u, see `score_rotated`, and the mean of |v_t| under that softmax, both [B, HQ, N]."""
    (B, N), H = table.shape, planes.shape[1]
    ids = table.clamp(min=0).flatten()
    digests = planes.index_select(0, ids), stats.index_select(0, ids)
    keys = decode(*digests)  # [B * N, H, 32, D]
    norms = value_norms(digests[1]).view(B, N, H, PAGE_TOKENS)
    q = rotate(q.view(B, H, q.shape[1] // H, q.shape[2]) * scale)
    logits = torch.einsum("bhgd,bnhtd->bhgnt", q, keys.view(B, N, *keys.shape[1:]))
    means = torch.einsum("bhgnt,bnht->bhgn", logits.softmax(-1), norms)
    return logits.logsumexp(-1).flatten(1, 2), means.flatten(1, 2)


def score_rotated(
    q: Float[Tensor, "B HQ D"],
    planes: UInt8[Tensor, "P H 2 16 D//4"],
    stats: UInt8[Tensor, "P H D+112"],
    table: Int32[Tensor, "B N"],
    n_full: Int32[Tensor, " B"],
    scale: float,
) -> Float32[Tensor, "B N"]:
    """Score every full page of every request against its (predicted) query.

        u[h, p] = log sum_t exp(scale R q[h] . x_t)       the estimated log softmax mass of the page

    and u is reduced over heads as in `score_pages`, except that each token is weighted by the norm of its value: summed
    is sum_t w[h, t] |v_t|, an upper bound on what head h's output loses without the page.

    Returns:
        -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: codes as in RaBitQ (arXiv 2405.12497) and QuIP (arXiv 2307.13304); norms of values as in VATP (arXiv
        2406.12335); combining them into a page score: ours.
    """
    run = kernels.rotated_scores.score_rotated if q.is_cuda else _score_rotated_native
    return run(q, planes, stats, table, n_full, scale)


def score_rotated_reference(q, planes, stats, table, n_full, scale):
    masses, means = page_masses(q.float(), planes, stats, table, scale)
    return reduce_heads(masses, table, n_full, means)


def _score_rotated_native(q, planes, stats, table, n_full, scale):
    out, threads = q.new_empty(table.shape, dtype=torch.float32), torch.get_num_threads()
    _native.score_rotated(q.float(), planes, stats, table, n_full, scale, False, out, threads)
    return out


def _change(masses, q, q_ahead, planes, stats, pages, n_pages, scale):
    """With one list per KV head, each (page, head) is a page of one head, so that a list reads its head only.
    ``masses(q, ...)``: [rows, heads] of a query."""
    lists = len(pages) // len(q) if len(q) else 1
    if lists != 1:
        head = torch.arange(lists, dtype=torch.int32, device=pages.device)[:, None]
        pages = (pages.unflatten(0, (-1, lists)) * lists + head).flatten(0, 1)
        planes, stats = (x.flatten(0, 1).unsqueeze(1) for x in (planes, stats))
    size = len(pages), q.shape[1] // lists, q.shape[2]
    real, ahead = (
        masses(x.float().view(size), planes, stats, pages, n_pages, scale) for x in (q, q_ahead)
    )
    return (real - ahead).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(q.shape[:2])


def mass_change_rotated(
    q: Float[Tensor, "B HQ D"],
    q_ahead: Float[Tensor, "B HQ D"],
    planes: UInt8[Tensor, "P H 2 16 D//4"],
    stats: UInt8[Tensor, "P H D+112"],
    pages: Int32[Tensor, "BC N"],
    n_pages: Int32[Tensor, " BC"],
    scale: float,
) -> Float32[Tensor, "B HQ"]:
    """Estimate the difference in log softmax mass of the given pages between two queries: m(q) - m(q_ahead) with

        m[h](q) = log sum_p sum_t exp(scale R q[h] . x_t[p])

    over the first n_pages of each row; negative ones are padding. With H lists per request, row b * H + h belongs to
    KV head h of request b. 0 for a row without pages, and where the difference is not finite.
    """
    run = kernels.rotated_scores.mass_change_rotated if q.is_cuda else _mass_change_rotated_native
    return run(q, q_ahead, planes, stats, pages, n_pages, scale)


def mass_change_rotated_reference(q, q_ahead, planes, stats, pages, n_pages, scale):
    def masses(q, planes, stats, pages, n_pages, scale):
        column = torch.arange(pages.shape[1], device=pages.device)
        void = (column >= n_pages[:, None]) | (pages < 0)
        u, _ = page_masses(q, planes, stats, pages, scale)
        return u.masked_fill_(void[:, None], -torch.inf).logsumexp(-1)

    return _change(masses, q, q_ahead, planes, stats, pages, n_pages, scale)


def _mass_change_rotated_native(q, q_ahead, planes, stats, pages, n_pages, scale):
    def masses(q, *of_pages):
        out = q.new_empty(q.shape[:2])
        _native.score_rotated(q, *of_pages, True, out, torch.get_num_threads())
        return out

    return _change(masses, q, q_ahead, planes, stats, pages, n_pages, scale)
