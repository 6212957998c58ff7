"""``doctor``'s findings when SGLang's layers are not as expected; the passing case is in ``test_doctor.py``."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.benchmark import one_batch

from sglang_scout.ops.predict import add_norm
from sglang_scout.plugin import query_check

LEFT_OUT = """
from sglang_scout.plugin import query_check
from sglang_scout.plugin.hooks import adapter
of_layer = adapter.layer_input
adapter.layer_input = lambda *given: (of_layer(*given)[0], None)
query_check.main()
"""


def test_a_residual_that_is_left_out_is_found():
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", LEFT_OUT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert "the query of layer 1 differs" in error


def test_queries_that_were_not_seen_are_missed(monkeypatch, capsys):
    monkeypatch.setattr(one_batch, "main", lambda server, benchmark: None)
    query_check.main()
    error = json.loads(capsys.readouterr().out)["error"]
    assert "queries of some layers were not seen" in error


WEIGHT = torch.randn(4 * 8, 24, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(3)


def project(x, residual):
    return add_norm(x, residual, torch.ones(24), 1e-6) @ WEIGHT.T


def probe(dtype=torch.float32):
    return query_check.QueryProbe(
        [SimpleNamespace(start=project, finish=lambda q, _: q.view(-1, 4, 8).to(dtype))] * 2
    )


def layer_input():
    x, residual = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1))
    return x, residual, project(x, residual).view(-1, 4, 8)


def test_each_layer_is_asked_once():
    made, (x, residual, q) = probe(torch.bfloat16), layer_input()
    for layer in (0, 1):
        made.layer_input(layer, x, residual, POSITIONS)
        made.query(layer, q)
    assert not made.unseen
    made.layer_input(0, x, None, POSITIONS)
    made.query(0, q)


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
