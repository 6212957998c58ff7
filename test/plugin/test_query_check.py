"""``doctor``'s findings when SGLang's layers are not as expected; the passing case is in ``test_doctor.py``."""

import json
import os
import subprocess
import sys

import pytest

LEFT_OUT = """
from sglang_scout.plugin.release import adapter
of_layer = adapter.layer_input
adapter.layer_input = lambda *given: (of_layer(*given)[0], None)
"""
NOT_CALLED = """
import torch
torch.nn.Module.register_forward_pre_hook = lambda *_, **__: None
"""


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (LEFT_OUT, "the query of layer 1 differs"),
        (NOT_CALLED, "queries of some layers were not seen"),
    ],
    ids=["the residual is left out", "hooks are not called"],
)
def test_other_queries_than_predicted_are_found(change, error):
    code = f"{change}\nfrom sglang_scout.plugin import query_check; query_check.main()"
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert error in json.loads(done.stdout.splitlines()[-1])["error"]
