"""Attention by an implementation that was named: it runs, or the engine is not made."""

import dataclasses
import json

import pytest
import torch

from sglang_scout.core import registry
from sglang_scout.core.errors import ConfigError
from sglang_scout.ops import flash, triton
from sglang_scout.ops.attend import attend_pages


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setattr(attend_pages, "preferred", "auto")
    monkeypatch.setattr(registry, "_chosen", {})


@pytest.fixture
def on_hopper(monkeypatch):
    """Tensors count as a Hopper device's; the package is absent."""

    def absent():
        raise ImportError("no FA3 here")

    monkeypatch.setattr(flash, "library", absent)
    here = [
        dataclasses.replace(i, devices=lambda _: []) if i is flash.FLASH else i
        for i in attend_pages.implementations
    ]
    monkeypatch.setattr(attend_pages, "implementations", here)


@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_the_named_one_runs_and_is_shown(make):
    worker = make(config='{"attend_kernel": "triton"}', layers=1)
    worker.admit(100)
    worker.step()
    assert registry.chosen()["attend_pages"].startswith("triton")
    assert make().engine and attend_pages.preferred == "auto"


@pytest.mark.parametrize(
    ("policy", "keys", "shape", "why"),
    [
        ("scout", {}, {}, "flash' cannot run with --kv-offload scout .* sgl_kernel: no FA3 here; drop the key"),
        ("scout", {}, {"fp8": torch.float8_e4m3fn}, "KV in float8_e4m3fn: dtype .* supports bfloat16"),
        ("sparda", {"forecast_file": "w.npz"}, {}, r"sparda \(C=2 .* bfloat16: C=2; flash supports up to 1"),
        ("scout", {"grain": "head", "attend": "resident"}, {}, r"\(C=1 .* bfloat16: sgl_kernel"),
        ("hgca", {}, {}, r"hgca \(C=1 .* sgl_kernel"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_at_the_start(make, on_hopper, policy, keys, shape, why):
    config = json.dumps(keys | {"attend_kernel": "flash"})
    with pytest.raises(ConfigError, match=why) as refused:
        make(policy=policy, config=config, dtype=torch.bfloat16, budget_tokens=256, **shape)
    assert str(refused.value).startswith("--kv-offload-config: attend_kernel = 'flash' cannot run")
    assert attend_pages.preferred == "auto"


def test_a_device_that_it_does_not_know_is_a_reason(make):
    with pytest.raises(ConfigError, match="is on cpu; flash supports cuda"):
        make(config='{"attend_kernel": "flash"}')
