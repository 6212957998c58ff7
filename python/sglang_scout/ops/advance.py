"""Move a layer's input towards the next layer's: what a query is predicted from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.registry import Tolerance
from . import triton
from .op import op

_NORM_EPS = 1e-12

TOLERANCES = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 products over the hidden size in another order"),
    "bfloat16": Tolerance(2**-6, 2**-7, "one rounding to 8 bits of the sum"),
    "float16": Tolerance(2**-9, 2**-10, "one rounding to 11 bits of the sum"),
}


class Correction(NamedTuple):
    """A learned low-rank map from what is known at a layer's input to its change across the layer.

    now, previous: [C, r] float32. out: [r, C] float32. bias: [C] float32.
    """

    now: torch.Tensor
    previous: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor


@op(
    x="B C model",
    before="B C model",
    after="B C model",
    known="B bool",
    correction=("C R float32", "C R float32", "R C float32", "C float32"),
    tolerances=TOLERANCES,
)
def advance_input(
    x: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    known: torch.Tensor,
    carry: float = 0.0,
    correction: Correction | None = None,
) -> torch.Tensor:
    """The input that the next layer will (nearly) get, from this layer's input x.

        x + carry (after - before) + rms(x) (((x / rms(x)) A + (after / rms(after)) B) O + b)

    with the correction (A, B, O, b). Without one the last term is absent; without carry the second.

    Args:
        x: [B, C] model dtype, residual stream of this token at the input of the layer.
        before, after: [B, C] dtype of ``x``, that of the same request's previous token at the
            inputs of this layer and of the next.
        known: [B] bool; rows whose previous token was not seen come back as they are.
        carry: share of the previous token's change across the layer that is added.
    Returns:
        [B, C], rounded once from fp32 to the dtype of ``x``, a new tensor.
    Source: ScoutAttention section 3.3 uses x as it is; both terms are ours.
    """
    now, after = x.float(), after.float()
    moved = now + carry * (after - before.float())
    if correction is not None:
        size = now.pow(2).mean(-1, keepdim=True).add(_NORM_EPS).sqrt()
        last = after * torch.rsqrt(after.pow(2).mean(-1, keepdim=True) + _NORM_EPS)
        low = (now / size) @ correction.now + last @ correction.previous
        moved = moved + size * (low @ correction.out + correction.bias)
    return torch.where(known[:, None], moved.to(x.dtype), x)


triton.implements(advance_input, "advance", sizes={"R": range(1, 129)})
