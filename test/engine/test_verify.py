"""The verifier detects wrong outputs: every assertion on its number depends on it."""

import numpy as np
import pytest
import torch

from sglang_scout.engine.verify import NOT_FINITE, co_attention_reference, relative_error

PAGES, SIZE, HEADS, DIM = 4, 8, 2, 16
ON_DEVICE, ON_CPU, TAIL, LENGTH = (1, -1), (3,), 2, 5
CHANGE = torch.tensor([[0.5, -1.0, 0.0, 2.0]])


def case():
    """(arguments of relative_error without the output, the correct output)."""
    source = torch.Generator().manual_seed(3)
    k, v = (torch.randn(PAGES, SIZE, HEADS, DIM, generator=source) for _ in range(2))
    q, q_ahead = (torch.randn(1, 2 * HEADS, DIM, generator=source) for _ in range(2))
    on_device, on_cpu = (np.array([x], np.int32) for x in (ON_DEVICE, ON_CPU))
    right = co_attention_reference(
        q[0],
        q_ahead[0],
        torch.cat([k[1], k[TAIL, :LENGTH]]),
        torch.cat([v[1], v[TAIL, :LENGTH]]),
        k[3],
        v[3],
        0.25,
        mass_change=CHANGE[0],
    )
    tail = np.array([TAIL], np.int32), np.array([LENGTH], np.int32)
    return [q, q_ahead, on_device, on_cpu, *tail, k, v, 0.25, CHANGE], right[None]


def test_what_is_right_and_what_is_not():
    arguments, right = case()
    assert relative_error(right, *arguments) <= 1e-6
    assert relative_error(torch.zeros_like(right), *arguments) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_the_largest_error(value):
    arguments, right = case()
    right[0, -1, -1] = value
    assert relative_error(right, *arguments) == NOT_FINITE
    # Also if the pages themselves hold it.
    arguments, right = case()
    arguments[7][3, 0, 0, 0] = value
    assert relative_error(right, *arguments) == NOT_FINITE
