"""Page digests of one or two bits per key element, after a rotation that evens out the channels.

A minimum and a maximum bound all tokens of a page by one box. This describes each token: the page's mean key, and
for every token the rotated difference of its key from the mean, as a sign or one of four levels per channel.

    x_t = R k_t                  R: sign flips, then Hadamard transforms: orthogonal, so that R q . R k = q . k
    m   = mean_t x_t, in int8    with one step per page and KV head
    s_t = rms(x_t - m)           the scale of a token, in bfloat16
    one bit    x_t ~ m + s_t ONE_BIT b1                     b1 = +-1, the sign of x_t - m
    two bits   x_t ~ m + s_t (FIRST b1 + SECOND b2)         b2 = b1 where |x_t - m| > FIRST s_t, else -b1

These levels minimize the squared error for a normal variable (Max 1960), which rotated channels nearly are
(QuIP, RaBitQ). The levels are sums over bits, so both bit planes are scored by the same products.

Also stored is the norm of each token's value: a page matters by what its tokens add to the output, their weights times
their values, which is at most

    sum_t w_t |v_t|              |v_t| in uint8, with one step per page and KV head

Layout of a page and KV head, in two tensors:
    planes  [bits, 16, D / 4]  each byte holds four channels of token t (low nibble) and token 16 + t (high nibble)
    stats   [D + 112]          m in int8 [D]; s in bfloat16 [32]; the steps of m and of |v| in float32; |v| in uint8
                               [32]; 8 bytes of zero
"""

from __future__ import annotations

import functools

import torch

from ..core.page_bytes import ROTATED_STATS_BYTES as STATS_BYTES
from ..core.registry import Tolerance
from . import native, triton
from .digest import given_rows, same_rows
from .layers import KV_DTYPE_NAMES, LayerPages, source_rows
from .op import Call, op
from .score import REDUCTIONS, reduce_heads

PAGE_TOKENS = 32
ONE_BIT, FIRST, SECOND = 0.79788, 0.98160, 0.52880
LARGEST = 2.0**50
"""Elements of K and V are clamped to this and NaN becomes 0, so that digests and scores stay finite."""

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


def rotate(x: torch.Tensor) -> torch.Tensor:
    """R x for ``x`` [..., D] float32; D a multiple of 16."""
    return x @ _rotation(x.shape[-1], x.device)


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


def decode(planes: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Dequantized rotated keys, [n, H, 32, D] float32, from [n, H, bits, 16, D / 4] and [n, H, D + 112]."""
    D = 4 * planes.shape[-1]
    # Copied for alignment to their dtypes.
    mean = stats[..., :D].contiguous().view(torch.int8).float()
    scale = stats[..., D : D + 64].contiguous().view(torch.bfloat16).float()
    step = stats[..., D + 64 : D + 68].contiguous().view(torch.float32)
    bits = _unpacked(planes)  # [n, H, bits, 32, D]
    level = bits[:, :, 0] * ONE_BIT
    if bits.shape[2] == 2:
        level = bits[:, :, 0] * FIRST + bits[:, :, 1] * SECOND
    return (mean * step)[:, :, None] + scale[..., None] * level


def value_norms(stats: torch.Tensor) -> torch.Tensor:
    """Dequantized norms of the values, [n, H, 32] float32, from digests [n, H, D + 112]."""
    end = stats.shape[-1] - 8
    step = stats[..., end - 36 : end - 32].contiguous().view(torch.float32)
    return stats[..., end - 32 : end].float() * step


def made_finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)


def _steps(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [..., n] quantized to whole steps, and the step [..., 1]: the largest magnitude is ``levels`` steps."""
    step = (x.abs().amax(-1, keepdim=True) / levels).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / step).round(), step


def valid_digests(call: Call) -> str:
    D = call.sizes["D"]
    wanted = {"S": PAGE_TOKENS, "J": PAGE_TOKENS // 2, "C": D // 4, "T": D + STATS_BYTES}
    for name, size in wanted.items():
        if (found := call.sizes.get(name, size)) != size:
            return f"{name}={found}, expected {size}"
    return same_rows(call) if "S" in call.sizes else ""


@op(
    valid_digests,
    source="L R S H D kv",
    ids="n int64",
    rows="L n int64",
    planes="L P H B J C uint8",
    stats="L P H T uint8",
    tolerances=BUILD_TOLERANCES,
)
def build_layer_rotated(
    source: LayerPages,
    ids: torch.Tensor,
    planes: torch.Tensor,
    stats: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Write the digests of pages ``ids`` in every layer; all other rows are unchanged.

    One launch on a device, regardless of the number of layers.

    Args:
        source: K and V of each layer, [P, 32, H, D] any float dtype; the pages in ``ids`` are full. D a multiple of 16.
        ids: [n] int64 in [0, P); n may be 0.
        planes, stats: [L, P, H, B, 16, D / 4] with B = 1 or 2 bits, and [L, P, H, D + 112], uint8; mutated.
        rows: as in `build_layer_digests`.
    Source: see the module docstring.
    """
    of_keys, of_values = (source_rows(x, ids, rows) for x in (source.k, source.v))
    for layer, parts in enumerate(zip(of_keys, of_values, strict=True)):
        # [n, H, 32, D]
        k, v = (made_finite(x.to(planes.device).float()).transpose(1, 2) for x in parts)
        x = rotate(k)
        mean, step = _steps(x.mean(2), 127)
        norms, norm_step = _steps(v.norm(dim=-1), 255)
        x = x - (mean * step)[:, :, None]
        scale = x.square().mean(-1).sqrt()  # [n, H, 32]
        first = x >= 0
        bits = [first, first == (x.abs() > FIRST * scale[..., None])][: planes.shape[3]]
        planes[layer].index_copy_(0, ids, torch.stack([_packed(b) for b in bits], 2))
        zero = step.new_zeros(*step.shape[:2], 2)
        stored = mean.to(torch.int8), scale.bfloat16(), step, norm_step, norms.to(torch.uint8), zero
        row = torch.cat([part.contiguous().view(torch.uint8) for part in stored], -1)
        stats[layer].index_copy_(0, ids, row)


def page_masses(
    q: torch.Tensor, planes: torch.Tensor, stats: torch.Tensor, table: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """u[h, p] = log sum_t exp(scale R q[h] . x_t), the estimated log softmax mass of the page, and the mean of |v_t|
    under that softmax, both [B, HQ, N]."""
    (B, N), H = table.shape, planes.shape[1]
    ids = table.clamp(min=0).flatten()
    keys = decode(planes.index_select(0, ids), stats.index_select(0, ids))  # [B * N, H, 32, D]
    norms = value_norms(stats.index_select(0, ids)).view(B, N, H, PAGE_TOKENS)
    q = rotate(q.view(B, H, q.shape[1] // H, q.shape[2]) * scale)
    logits = torch.einsum("bhgd,bnhtd->bhgnt", q, keys.view(B, N, *keys.shape[1:]))
    means = torch.einsum("bhgnt,bnht->bhgn", logits.softmax(-1), norms)
    return logits.logsumexp(-1).flatten(1, 2), means.flatten(1, 2)


def operand_dim(D: int) -> int:
    """D, padded for the products of a kernel."""
    return max(32, 1 << (D - 1).bit_length())


def digits_bytes(bits: int, D: int) -> int:
    """Bytes of `query_digits` of one head."""
    return 2 * (1 + bits) * operand_dim(D) + 16


def _valid_digits(call: Call) -> str:
    found, wanted = call.sizes.get("digit_bytes"), digits_bytes(call.sizes["bits"], call.sizes["D"])
    if found not in (None, wanted):
        return f"digits has {found} bytes a head, expected {wanted}"
    return valid_digests(call)


DIGESTS = {"planes": "P H bits J C uint8", "stats": "P H T uint8"}


@op(
    _valid_digits,
    **DIGESTS,
    table="B N int32",
    n_full="B int32",
    q="B H*G D query",
    reduce=REDUCTIONS,
    out="B N float32",
    arrivals="B int32",
    digits="B H*G digit_bytes uint8",
    tolerances=TOLERANCES,
)
def score_rotated(
    q: torch.Tensor,
    planes: torch.Tensor,
    stats: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    digits: torch.Tensor | None = None,
    every: int = 1,
) -> torch.Tensor:
    """Score every full page of every request against its (predicted) query.

        u[h, p] = log sum_t exp(scale R q[h] . x_t)        the estimated log softmax mass of the page

    and u is reduced over heads as in `score_pages`, except that "mass" weights each token by the norm of its value: it
    sums sum_t w[h, t] |v_t|, an upper bound on what head h's output loses without the page.

    Args:
        q: [B, HQ, D] any float dtype, after RoPE.
        planes, stats: [P, H, bits, 16, D / 4] and [P, H, D + 112] uint8, of one layer, see `build_layer_rotated`;
            H divides HQ.
        table, n_full, scale, reduce, out, arrivals, every: as in `score_pages`.
        digits: `query_digits` of ``q``, which a kernel then takes instead; None: it makes them, one more launch.
    Returns:
        [B, N] float32; -inf in columns >= n_full and where table < 0. A row may be all -inf.
    Source: codes as in RaBitQ (arXiv 2405.12497) and QuIP (arXiv 2307.13304); norms of values as in VATP (arXiv
        2406.12335); combining them into a page score: ours.
    """
    masses, means = page_masses(q.float(), planes, stats, table, scale)
    score = reduce_heads(masses, table, n_full, reduce, means)
    return score if out is None else out.copy_(score)


NATIVE_DIMS = {"D": range(16, 1025, 16)}  # sums over larger heads would overflow 16 bits


@native.implements(
    build_layer_rotated,
    dtypes=tuple(native.KV_DTYPES),
    unless=given_rows,
    sizes=NATIVE_DIMS,
)
def _native_build(source, ids, planes, stats, rows):
    P, _, H, D = source.k[0].shape
    native.check_ids("build_layer_rotated", "ids", ids, P)
    for k, v, of_planes, of_stats in zip(source.k, source.v, planes, stats, strict=True):
        native.module.rotate_pages(
            k.data_ptr(), v.data_ptr(), H, D, native.KV_DTYPES[k.dtype], ids.data_ptr(), ids.numel(),
            planes.shape[3], of_planes.data_ptr(), of_stats.data_ptr(),
        )  # fmt: skip


def native_reduced(q, planes, stats, table, n_full, scale, reduce, out):
    P, H, bits, *_ = planes.shape
    native.module.score_rotated(
        q.data_ptr(), planes.data_ptr(), stats.data_ptr(), P, H, q.shape[1] // H, q.shape[2], bits,
        table.data_ptr(), n_full.data_ptr(), *table.shape, float(scale), reduce, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


@native.implements(score_rotated, sizes=NATIVE_DIMS)
def _native_score(q, planes, stats, table, n_full, scale, reduce, out, arrivals, digits, every):
    q = q.float()
    out = q.new_empty(table.shape) if out is None else out
    arguments = q, planes, stats, table, n_full, scale
    return native_reduced(*arguments, REDUCTIONS.index(reduce), out)


triton.implements(
    build_layer_rotated,
    "rotate",
    pinned=("source.k", "source.v"),
    dtypes=triton.KV_DTYPES,
    sizes={"D": triton.HEAD_DIMS},
)
triton.implements(score_rotated, "rotated", sizes={"D": triton.HEAD_DIMS})
