"""Page digests in int8, rounded outward: a bound stays a bound, in 53 % of the bytes of bfloat16.

Minimum m and maximum M of the 32 channels of a group share one fp32 step, a little more than the
largest magnitude / 127:

    low = floor(m / step) <= m / step,  high = ceil(M / step) >= M / step,

each corrected until low * step <= m and high * step >= M hold in fp32. Quest's u = sum_d max(q_d m_d,
q_d M_d) only grows when m falls or M rises, so the score of a page bounds its tokens as before; it is
looser by at most one step per channel. A group that holds an infinity or a NaN gets a NaN as its step,
so that its page scores NaN, which `select_pages` puts last.
"""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import triton
from .score import REDUCTIONS, score_reference
from .shapes import Shapes

GROUP = 32  # channels that share a step
# 1 / 127 and 4 units of fp32 more, so that no quotient reaches 127, whatever is rounded.
STEPS = 1 / 127 * (1 + 2**-21)
LEAST_STEP = 2.0**-120

PACK_TOLERANCES = {
    name: Tolerance(0.0, 0.0, "the same fp32 operations element by element")
    for name in ("float32", "bfloat16", "float16")
}
SCORE_TOLERANCES = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 sums of up to 256 products in another order, exp or log")
}


def pack_reference(
    kmin: torch.Tensor, kmax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and steps of digests [n, H, D].

    Returns:
        (low [n, H, D] int8, high [n, H, D] int8, step [n, H, D / 32] float32).
    """
    m, M = (x.float().unflatten(-1, (-1, GROUP)) for x in (kmin, kmax))
    good = (m.isfinite() & M.isfinite()).all(-1, keepdim=True)
    m, M = m.where(good, 0.0), M.where(good, 0.0)
    size = torch.maximum(m.abs(), M.abs()).amax(-1, keepdim=True)
    step = (size * STEPS).clamp(min=LEAST_STEP)
    low, high = (m / step).floor(), (M / step).ceil()
    low -= (low * step > m).float()
    high += (high * step < M).float()
    step = step.where(good, torch.nan).squeeze(-1)
    return low.flatten(-2).to(torch.int8), high.flatten(-2).to(torch.int8), step


def unpack_digests(codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Values of codes [..., D] int8 with step [..., D / 32] float32, as float32."""
    return (codes.unflatten(-1, (-1, GROUP)).float() * step[..., None]).flatten(-2)


def _pack_reference(
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """`pack_digests` by gather, round, scatter."""
    packed = pack_reference(kmin.index_select(0, ids), kmax.index_select(0, ids))
    for pool, new in zip((low, high, step), packed, strict=True):
        pool.index_copy_(0, ids, new)


def _bind_packed(shapes: Shapes, low: torch.Tensor, high: torch.Tensor, step: torch.Tensor) -> None:
    shapes.bind("low", low, "PHD", torch.int8)
    shapes.bind("high", high, "PHD", torch.int8)
    if shapes["D"] % GROUP:
        shapes.fail(f"low has D={shapes['D']}, expected a multiple of {GROUP}")
    shapes.sizes["C"] = shapes["D"] // GROUP
    shapes.bind("step", step, "PHC", torch.float32)


def _check_pack(
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
) -> None:
    shapes = Shapes("pack_digests")
    shapes.bind("kmin", kmin, "PHD")
    shapes.bind("kmax", kmax, "PHD", kmin.dtype)
    shapes.bind("ids", ids, "n", torch.int64)
    _bind_packed(shapes, low, high, step)


PACK_DIGESTS = Op(
    "pack_digests",
    _pack_reference,
    [triton.PACK_DIGESTS],
    check=_check_pack,
    tolerances=PACK_TOLERANCES,
)


def pack_digests(
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Round the digests of pages ``ids`` outward to int8; all other rows stay as they are.

    Args:
        kmin, kmax: [P, H, D] float32, bfloat16 or float16, of one layer, see `build_layer_digests`;
            D % 32 == 0.
        ids: [n] int64 in [0, P); n may be 0; no id twice.
        low, high: [P, H, D] int8, step: [P, H, D / 32] float32; mutated.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    """
    PACK_DIGESTS(kmin, kmax, ids, low, high, step, impl=impl)


def score_int8_reference(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`score_pages` of the unpacked digests."""
    values = (unpack_digests(codes, step) for codes in (low, high))
    return score_reference(q, *values, table, n_full, scale, reduce, out)


def _check_score(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> None:
    shapes = Shapes("score_pages_int8")
    _bind_packed(shapes, low, high, step)
    shapes.bind_scoring(q, table, n_full, out)
    shapes.one_of("reduce", reduce, REDUCTIONS)


SCORE_PAGES_INT8 = Op(
    "score_pages_int8",
    score_int8_reference,
    [triton.SCORE_PAGES_INT8],
    check=_check_score,
    tolerances=SCORE_TOLERANCES,
)


def score_pages_int8(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    impl: str = "auto",
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`score_pages` on packed digests: at least the score of the digests that were packed.

    That holds for the bounds, so for reduce "sum"; "mass" and "max" compare pages of one request.

    Args:
        low, high: [P, H, D] int8, step: [P, H, D / 32] float32, see `pack_digests`.
        All others and the result: as `score_pages`.
    Raises:
        ValueError: sizes, dtypes or ``reduce``. ImplementationError: see `registry.Op`.
    """
    return SCORE_PAGES_INT8(q, low, high, step, table, n_full, scale, reduce, impl=impl, out=out)
