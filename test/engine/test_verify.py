"""The verifier detects wrong outputs: every assertion on its number depends on it."""

from types import SimpleNamespace

import pytest
import torch

from sglang_scout.engine.ahead import Ahead
from sglang_scout.engine.digests import MinMax
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.stores import Counters, HostPages, ModelShape
from sglang_scout.engine.verify import NOT_FINITE, Verifier, co_attention_reference

PAGES, SIZE, HEADS, DIM = 4, 8, 2, 16
TAIL, LENGTH = 2, 5


def error_of(change_out=lambda out: None, change_host=lambda host: None):
    """Of the correct output of page 1 on the device, 3 on the CPU and a tail, after these changes."""
    source = torch.Generator().manual_seed(3)
    shape = ModelShape(1, 2 * HEADS, HEADS, DIM, SIZE, torch.float32, 0.25)
    planes = torch.randn(2, 1, PAGES * SIZE, HEADS, DIM, generator=source)
    host = HostPages(shape, *planes)
    q, q_ahead = (torch.randn(1, 2 * HEADS, DIM, generator=source) for _ in range(2))
    (k,), (v,), change = host.k, host.v, torch.tensor([[0.5, -1.0, 0.0, 2.0]])
    device = (torch.cat([x[1], x[TAIL, :LENGTH]]) for x in (k, v))
    out = co_attention_reference(q[0], q_ahead[0], *device, k[3], v[3], 0.25, change[0])[None]
    change_out(out)
    change_host(host)
    counters, tail = Counters(1), (torch.tensor([TAIL]), torch.tensor([LENGTH]))
    pages, slot_of = torch.tensor([[1, 3, -1]]), torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    batch = SimpleNamespace(tail_page=tail[0], tail_len=tail[1])
    policy = SimpleNamespace(route="cpu", rule=SelectionRule(MinMax))
    parts = SimpleNamespace(host=host, shape=shape, policy=policy, counters=counters, ranks=None)
    ahead = Ahead(q_ahead, pages, None, torch.tensor([[3, -1]]), torch.ones(1))
    Verifier(parts).check(0, out, q, ahead, slot_of, batch, change)
    return counters.verify_max_rel_error


def test_what_is_right_and_what_is_not():
    assert error_of() <= 1e-6
    assert error_of(torch.Tensor.zero_) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_the_largest_error(value):
    assert error_of(lambda out: out[0, -1, -1].fill_(value)) == NOT_FINITE
    assert error_of(change_host=lambda host: host.k[0][3, 0, 0].fill_(value)) == NOT_FINITE
