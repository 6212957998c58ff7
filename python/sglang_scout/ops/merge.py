"""Merge the attention of two disjoint token sets by their log-sum-exp."""

from __future__ import annotations

import torch

from ..core.registry import Op, Tolerance
from . import triton
from .shapes import Shapes

TOLERANCES = {
    "float32": Tolerance(
        2e-6, 2e-6, "one sigmoid, whose exp and division a device approximates, and one sum"
    )
}


def merge_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` in plain torch: lse = log(e^a + e^b), out = out_a + w (out_b - out_a) with
    w = e^b / (e^a + e^b) = sigmoid(b - a).

    FlashAttention-2 section 3.1; ScoutAttention Algorithm 1 line 12 (MERGE). The sigmoid of the
    difference keeps the weight right to the last digits for any lse, which e^(a - lse) with a
    rounded lse does not.
    """
    weight = (lse_b - lse_a).sigmoid_().nan_to_num_(nan=0.0)  # both empty: NaN, then out_a, 0
    return torch.lerp(out_a, out_b, weight[..., None]), torch.logaddexp(lse_a, lse_b)


def _check(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    shapes = Shapes("merge_states")
    shapes.bind("out_a", out_a, "BQD", torch.float32)
    shapes.bind("lse_a", lse_a, "BQ", torch.float32)
    shapes.bind("out_b", out_b, "BQD", torch.float32)
    shapes.bind("lse_b", lse_b, "BQ", torch.float32)


MERGE_STATES = Op(
    "merge_states", merge_reference, [triton.MERGE_STATES], check=_check, tolerances=TOLERANCES
)


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets, from the attention over each.

    Args:
        out_a, out_b: [B, HQ, D] float32; 0 where the set was empty, as `attend_pages` leaves it.
        lse_a, lse_b: [B, HQ] float32, natural logarithm; -inf for an empty set.
    Returns:
        (out [B, HQ, D] float32, lse [B, HQ] float32), new tensors. Where one set is empty the
        other's values exactly; where both are, out = 0 and lse = -inf.
    Raises:
        ValueError: sizes or dtypes that do not agree.
    Source: ScoutAttention Algorithm 1 line 12; FlashAttention-2 section 3.1.
    """
    return MERGE_STATES(out_a, lse_a, out_b, lse_b, impl=impl)
