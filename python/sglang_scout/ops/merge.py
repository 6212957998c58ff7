"""Merge the attention of two disjoint token sets by their log-sum-exp."""

from __future__ import annotations

import torch

from ..core.registry import Tolerance
from . import triton
from .op import op

TOLERANCES = {
    "float32": Tolerance(
        2e-6, 2e-6, "one sigmoid, whose exp and division a device approximates, and one sum"
    )
}


@op(
    out_a="B Q D float32",
    lse_a="B Q float32",
    out_b="B Q D float32",
    lse_b="B Q float32",
    tolerances=TOLERANCES,
)
def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets, from the attention over each.

    lse = log(e^a + e^b), out = out_a + w (out_b - out_a) with w = e^b / (e^a + e^b) = sigmoid(b - a). The
    sigmoid of the difference is accurate to the last digits for any lse; e^(a - lse) with a rounded lse is not.

    Args:
        out_a, out_b: [B, HQ, D] float32; 0 where the set was empty, as `attend_pages` leaves it.
        lse_a, lse_b: [B, HQ] float32, natural logarithm; -inf for an empty set.
    Returns:
        (out [B, HQ, D] float32, lse [B, HQ] float32), new tensors. Where one set is empty, exactly
        the other's values; where both are, out = 0 and lse = -inf.
    Source: ScoutAttention Algorithm 1 line 12 (MERGE); FlashAttention-2 section 3.1.
    """
    weight = (lse_b - lse_a).sigmoid_().nan_to_num_(nan=0.0)  # NaN if both are empty
    return torch.lerp(out_a, out_b, weight[..., None]), torch.logaddexp(lse_a, lse_b)


# The second part may be the CPU's answer in pinned memory.
triton.implements(merge_states, "merge", pinned=("out_b", "lse_b"))
