"""Page digests in int8, rounded outward: a bound stays a bound, in 53 % of the bytes of bfloat16.

32 channels of the minimum m of a page's keys share a step, and so do those of the maximum M. A step is
a little more than the largest magnitude / 127, rounded up to bfloat16, and

    low = floor(m / step),  high = ceil(M / step),  so that  low * step <= m,  M <= high * step.

These products are exact in fp32, 8 bits by 8. So is the rounding: an m that is not n * step differs from
it by a unit of its own last place at least, which is more than half of one of n's, and m / step in fp32 is
not n. Quest's u = sum_d max(q_d m_d, q_d M_d) only grows when m falls or M rises, so the score of a page
bounds its tokens as before; it is looser by at most one step per channel. Where one of 32 channels of m
or M is infinite or NaN, both get NaN as their step, and the page has a NaN as its bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.page_bytes import STEP_CHANNELS
from ..core.registry import Op, Tolerance
from . import native_digest_int8 as native
from . import triton
from .digest import digest_reference
from .layers import LayerPages, bind_source, source_rows
from .score import REDUCTIONS, score_reference
from .shapes import Shapes

GROUP = STEP_CHANNELS
# 1 / 127 and 4 units of fp32 more, so that no quotient reaches 127, whatever is rounded.
STEPS = 1 / 127 * (1 + 2**-21)
LEAST_STEP = 2.0**-120
NO_STEP_BITS = 0x7FFF
"""The NaN that stands for a step where there is none."""

BUILD_TOLERANCES = {
    name: Tolerance(0.0, 0.0, "the same fp32 operations element by element")
    for name in ("float32", "bfloat16", "float16")
}
SCORE_TOLERANCES = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 sums of up to 256 products in another order, exp or log")
}


class Int8Digests(NamedTuple):
    """Of P pages, of one layer or, with an axis [L, ...] before it, of all.

    Attributes:
        low, high: [P, H, D] int8, in units of
        low_step, high_step: [P, H, D / 32] bfloat16.
    """

    low: torch.Tensor
    low_step: torch.Tensor
    high: torch.Tensor
    high_step: torch.Tensor


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 that is not below x, of positive finite fp32 numbers."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).bfloat16()


def code_reference(kmin: torch.Tensor, kmax: torch.Tensor) -> Int8Digests:
    """Digests [..., D], D % 32 == 0, rounded outward."""
    m, M = (x.float().unflatten(-1, (-1, GROUP)) for x in (kmin, kmax))
    good = (m.isfinite() & M.isfinite()).all(-1, keepdim=True)
    none = torch.tensor(NO_STEP_BITS, dtype=torch.int16, device=m.device).view(torch.bfloat16)
    found = []
    for bound, direction in ((m, -1.0), (M, 1.0)):
        x = bound.where(good, 0.0) * direction
        step = _rounded_up((x.abs().amax(-1, keepdim=True) * STEPS).clamp(min=LEAST_STEP))
        codes = ((x / step.float()).ceil() * direction).flatten(-2).to(torch.int8)
        found += [codes, step.where(good, none).squeeze(-1)]
    return Int8Digests(*found)


def decode(codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Values of codes [..., D] int8 with steps [..., D / 32], as float32."""
    return (codes.unflatten(-1, (-1, GROUP)).float() * step.float()[..., None]).flatten(-2)


def _build_reference(
    source: LayerPages,
    ids: torch.Tensor,
    digests: Int8Digests,
    rows: torch.Tensor | None = None,
) -> None:
    """`build_layer_digests_int8` by gather, reduce, round, scatter, layer after layer."""
    for k, *pools in zip(source_rows(source, ids, rows), *digests, strict=True):
        new = code_reference(*digest_reference(k))
        for pool, digest in zip(pools, new, strict=True):
            pool.index_copy_(0, ids, digest.to(pool.device))


def _bind(
    shapes: Shapes,
    axes: str,
    digests: Int8Digests,
) -> None:
    """``axes`` are those of the codes; the steps have C = D / 32 in place of D."""
    low, low_step, high, high_step = digests
    shapes.bind("low", low, axes, torch.int8)
    shapes.bind("high", high, axes, torch.int8)
    if shapes["D"] % GROUP:
        shapes.fail(f"low has D={shapes['D']}, expected a multiple of {GROUP}")
    shapes.sizes["C"] = shapes["D"] // GROUP
    shapes.bind("low_step", low_step, axes[:-1] + "C", torch.bfloat16)
    shapes.bind("high_step", high_step, axes[:-1] + "C", torch.bfloat16)


def _check_build(
    source: LayerPages,
    ids: torch.Tensor,
    digests: Int8Digests,
    rows: torch.Tensor | None = None,
) -> None:
    shapes = Shapes("build_layer_digests_int8", L=len(source.k))
    bind_source(shapes, source, ids, rows)
    _bind(shapes, "LPHD", digests)


BUILD_LAYER_DIGESTS_INT8 = Op(
    "build_layer_digests_int8",
    _build_reference,
    [native.BUILD_LAYER_DIGESTS_INT8, triton.BUILD_LAYER_DIGESTS_INT8],
    check=_check_build,
    tolerances=BUILD_TOLERANCES,
)


def build_layer_digests_int8(
    source: LayerPages,
    ids: torch.Tensor,
    digests: Int8Digests,
    rows: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """`build_layer_digests`, rounded outward to int8. All other rows stay as they are.

    Args:
        source: K of each layer, [P, S, H, D] any float dtype, D % 32 == 0; the named pages are full.
        ids: [n] int64 in [0, P); n may be 0; no id twice.
        digests: [L, P, ...]; mutated.
        rows: as of `build_layer_digests`.
    Raises:
        ValueError: sizes or dtypes that do not agree. ImplementationError: see `registry.Op`.
    """
    BUILD_LAYER_DIGESTS_INT8(source, ids, digests, rows, impl=impl)


def score_int8_reference(
    q: torch.Tensor,
    digests: Int8Digests,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`score_pages` of the decoded digests."""
    low, low_step, high, high_step = digests
    values = decode(low, low_step), decode(high, high_step)
    return score_reference(q, *values, table, n_full, scale, reduce, out)


def _check_score(
    q: torch.Tensor,
    digests: Int8Digests,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> None:
    shapes = Shapes("score_pages_int8")
    _bind(shapes, "PHD", digests)
    shapes.bind_scoring(q, table, n_full, out)
    shapes.one_of("reduce", reduce, REDUCTIONS)


SCORE_PAGES_INT8 = Op(
    "score_pages_int8",
    score_int8_reference,
    [native.SCORE_PAGES_INT8, triton.SCORE_PAGES_INT8],
    check=_check_score,
    tolerances=SCORE_TOLERANCES,
)


def score_pages_int8(
    q: torch.Tensor,
    digests: Int8Digests,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    impl: str = "auto",
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`score_pages` on int8 digests: at least the score of the digests that were rounded.

    That holds for the bounds, so for reduce "sum"; "mass" and "max" compare pages of one request.

    Args:
        digests: [P, ...], of one layer, see `build_layer_digests_int8`.
        All others and the result: as `score_pages`.
    Raises:
        ValueError: sizes, dtypes or ``reduce``. ImplementationError: see `registry.Op`.
    """
    return SCORE_PAGES_INT8(q, digests, table, n_full, scale, reduce, impl=impl, out=out)
