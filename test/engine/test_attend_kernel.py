"""Attention by a named implementation: it runs, or the engine is not created."""

import json

import pytest
import torch

from sglang_scout.core.errors import ConfigError
from sglang_scout.engine import attention
from sglang_scout.ops import flash, triton
from sglang_scout.ops.attend import attend_pages
from sglang_scout.ops.op import Implementation, chosen


@pytest.fixture
def on_hopper(monkeypatch):
    """Tensors appear to be on a Hopper device; the package is absent."""

    def absent():
        raise ImportError("no FA3 here")

    monkeypatch.setattr(flash, "library", absent)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(Implementation, "reaches", lambda *_: True)


def kernel_of(engine):
    return engine._attend.keywords["impl"]


@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
def test_the_named_one_runs_and_is_shown(make):
    worker = make(config='{"attend_kernel": "triton"}', layers=1)
    worker.admit(100)
    worker.step()
    assert kernel_of(worker.engine) == "triton" and "triton" in chosen()["attend_pages"]
    assert kernel_of(make().engine) == "auto", "of another engine"


@pytest.mark.parametrize(
    ("policy", "keys", "fp8", "why"),
    [
        ("scout", {}, None, "with --kv-offload scout .* sgl_kernel: no FA3 here; drop the key"),
        ("scout", {}, torch.float8_e4m3fn, "KV in float8_e4m3fn: queries .* supports one dtype"),
        ("sparda", {"forecast_file": "w"}, None, r"\(C=2 .* bfloat16: C=2; flash supports up to 1"),
        ("rheo", {"pilot_file": "w"}, None, r"\(C=1 .* bfloat16: sgl_kernel"),
        ("hgca", {}, None, r"hgca \(C=1 .* sgl_kernel"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(make, on_hopper, policy, keys, fp8, why):
    config = json.dumps(keys | {"attend_kernel": "flash"})
    with pytest.raises(ConfigError, match=why) as refused:
        make(policy=policy, config=config, dtype=torch.bfloat16, budget_tokens=256, fp8=fp8)
    assert str(refused.value).startswith("--kv-offload-config: attend_kernel = 'flash' cannot run")


def test_a_device_that_it_does_not_know_is_a_reason(make):
    with pytest.raises(ConfigError, match="is on cpu; flash supports cuda"):
        make(config='{"attend_kernel": "flash"}')


def calls():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 64), torch.randn(3, 32, 2, 64), torch.randn(3, 32, 2, 64)
    pages = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    return [(q, k, v, pages, None, None, 0.125)]


def add(monkeypatch, run):
    monkeypatch.setattr(attend_pages, "implementations", dict(attend_pages.implementations))
    attend_pages.register("theirs", run)
    return ["native", "theirs"]


def clock(*times_us):
    times = iter(times_us)
    return lambda runs: [run() for run in runs] and next(times)


@pytest.mark.parametrize(("theirs_us", "found"), [(9.0, "theirs"), (11.0, "native")])
def test_the_faster_of_two_that_agree_is_chosen(monkeypatch, theirs_us, found):
    def rounded(*call):
        out, lse = attend_pages.reference(*call)
        return out.bfloat16(), lse

    names = add(monkeypatch, rounded)
    assert attention.fastest(names, calls(), clock(10.0, theirs_us)) == found


def wrong(*call):
    out, lse = attend_pages.reference(*call)
    return out + 0.1, lse


def fails(*_):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("theirs", "why"), [(wrong, "elements differ"), (fails, "RuntimeError: no kernel image")]
)
def test_one_that_differs_or_fails_is_left_out(monkeypatch, caplog, theirs, why):
    names = add(monkeypatch, theirs)
    assert attention.fastest(names, calls(), clock(10.0, 1.0)) == "native"
    assert "attention kernel theirs is not used: " in caplog.text
    assert why in caplog.text


@pytest.mark.skipif(not triton.interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("key", "found"), [("auto", "triton"), ("native", "native")])
def test_an_engine_takes_the_fastest_unless_one_is_named(make, monkeypatch, key, found):
    monkeypatch.setattr(attention, "_POOL_PAGES", 4)
    monkeypatch.setattr(attention, "_CALLS", 2)
    monkeypatch.setattr(attention, "_TIMES", {"cpu": clock(10.0, 9.0)})
    worker = make(config=json.dumps({"attend_kernel": key}), layers=1)
    assert kernel_of(worker.engine) == found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_is_timed_in_a_graph():
    x = torch.ones(1 << 24, device="cuda")
    small, large = (attention.graph_time_us([part.exp_] * 3) for part in (x[:64], x))
    assert 0 < small < large
