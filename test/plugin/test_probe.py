"""A prediction from a part of a layer's input ends the server at its first step."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import pytest
import torch

from sglang_scout.ops.predict import QueryProjector, add_norm
from sglang_scout.plugin.query_check import QueryProbe

WEIGHT = torch.randn(4 * 8, 24, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(3)


def project(x, residual):
    return add_norm(x, residual, torch.ones(24), 1e-6) @ WEIGHT.T


def probe(dtype=torch.float32):
    return QueryProbe([QueryProjector(project, lambda q, _: q.view(-1, 4, 8).to(dtype))] * 2)


def layer_input():
    x, residual = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1))
    return x, residual, project(x, residual).view(-1, 4, 8)


def test_each_layer_is_asked_once():
    made, (x, residual, q) = probe(torch.bfloat16), layer_input()
    for layer in (0, 1):
        made.layer_input(layer, x, residual, POSITIONS)
        made.query(layer, q)
    made.layer_input(0, x, None, POSITIONS)
    made.query(0, q)


def test_a_part_of_the_input_is_not_enough():
    made, (x, _, q) = probe(), layer_input()
    made.layer_input(1, x, None, POSITIONS)
    with pytest.raises(RuntimeError, match="the query of layer 1 differs"):
        made.query(1, q)


def test_rows_of_memory_that_nobody_has_written_say_nothing():
    made, (x, residual, q) = probe(), layer_input()
    x[1] = q[1] = torch.nan
    made.layer_input(0, x, residual, POSITIONS)
    made.query(0, q)
    made, nothing = probe(), torch.full_like(q, torch.nan)
    made.layer_input(0, x, residual, POSITIONS)
    made.query(0, nothing)
    made.layer_input(0, x, None, POSITIONS)
    with pytest.raises(RuntimeError, match="layer 0"):
        made.query(0, q)
