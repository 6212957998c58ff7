"""The rig of ``benchmark/decode/gpu_decode.py``: that a step on a device which waits for the host is noticed."""

import argparse
import os

import pytest
import torch

from benchmark import rows
from benchmark.decode import gpu_decode
from benchmark.decode import harness as decode_rig
from sglang_scout.ops import triton


@pytest.fixture
def modes(monkeypatch):
    """What torch is told, without a device."""
    told = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", told.append)
    return told


def test_waiting_is_an_error_within_the_block_alone(modes):
    with decode_rig.no_waiting("cuda:0"):
        assert modes == ["error"]
    assert modes == ["error", 1]
    with pytest.raises(RuntimeError, match="synchronizing"), decode_rig.no_waiting("cuda"):
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", 1] * 2


def test_nothing_is_asked_of_torch_on_the_cpu(modes):
    with decode_rig.no_waiting("cpu"):
        pass
    assert modes == []


@pytest.mark.skipif(not triton.interpreted(), reason="runs the device's step in the interpreter")
def test_only_layers_of_steps_that_are_not_verified_may_not_wait(monkeypatch):
    pytest.importorskip("sglang_scout._native")
    inside = []

    class Guard:
        def __init__(self, device):
            assert device == "cpu"

        def __enter__(self):
            inside.append("begin")

        def __exit__(self, *_):
            inside.append("end")

    layers = decode_rig.Rig._layers
    monkeypatch.setattr(decode_rig, "no_waiting", Guard)
    monkeypatch.setattr(
        decode_rig.Rig, "_layers", lambda rig: (inside.append("layers"), layers(rig))
    )
    size = decode_rig.SIZES["tiny"]
    for verify in (False, True):
        inside.clear()
        store = decode_rig.Store(
            size, pages=29, batch=1, budget_pages=4, device="cpu", dtype=torch.float32,
            cpus=sorted(os.sched_getaffinity(0))[:1],
        )  # fmt: skip
        rig = decode_rig.Rig(
            store, decode_rig.DummyModel(size, torch.float32, "cpu"),
            decode_rig.QueryDrift(size, 1, 0.9, "cpu"), batch=1, context=500, budget_tokens=128,
            graph=False, verify=verify, strict=True,
        )  # fmt: skip
        rig.step()
        rig.step()
        rig.close()
        store.close()
        # Also where requests join, in what comes before the layers.
        guarded = ["begin", "end", "begin", "layers", "end"]
        assert inside == (["layers"] if verify else guarded) * 2


@pytest.mark.skipif(not triton.interpreted(), reason="runs the device's step in the interpreter")
def test_a_step_that_waits_fails_the_check(monkeypatch):
    pytest.importorskip("sglang_scout._native")

    def step(rig):
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(decode_rig.Rig, "step", step)
    wrong = gpu_decode.check("cpu")
    assert any("off: called a synchronizing CUDA operation" in line for line in wrong)


def test_a_check_says_how_far_it_got_and_stops_at_the_first_batch_that_fails(monkeypatch, capsys):
    said = []

    def findings(device, batch, steps):
        assert (device, steps) == ("cuda", 40)
        for kind in ("verified", "replayed"):
            said.append(capsys.readouterr().out)
            yield kind, ["no page was missing"] if (batch, kind) == (4, "verified") else []

    monkeypatch.setattr(gpu_decode, "findings", findings)
    assert gpu_decode.check("cuda") == ["batch 4, verified: no page was missing"]
    assert said == [
        "",
        "batch 1, verified: equal, 0 s\n",
        "batch 1, replayed: equal, 0 s\n",
        "batch 4, verified: no page was missing, 0 s\n",
    ]


@pytest.mark.skipif(not triton.interpreted(), reason="runs the device's step in the interpreter")
def test_a_check_ends_with_the_first_step_that_lacks_an_answer(monkeypatch):
    pytest.importorskip("sglang_scout._native")
    monkeypatch.setattr(decode_rig.DeviceRing, "faults", lambda _: ["no answer in time"])
    found = list(gpu_decode.findings("cpu", 1, steps=3))
    assert found == [(kind, ["step 0: no answer in time"]) for kind in ("verified", "off")]


class HalfAStore:
    """Of a store what the variants are told; ``one`` is a stand-in."""

    def __init__(self, size, *, pages, **_):
        self.pages = pages

    def wait_mapped(self, most_s):
        return 0.995

    def close(self):
        pass


@pytest.mark.parametrize(("host_gb", "batch"), [(48.0, 10), (96.0, 21)])
def test_rows_say_whether_the_batch_is_larger_than_that_of_full_attention(
    monkeypatch, capsys, host_gb, batch
):
    found = []
    monkeypatch.setattr(gpu_decode, "Store", HalfAStore)
    monkeypatch.setattr(gpu_decode, "calibrated_rho", lambda *_: 0.99)
    monkeypatch.setattr(
        gpu_decode, "one", lambda writer, store, model, about, *_: found.append(about)
    )
    monkeypatch.setattr(gpu_decode, "free_device", lambda: None)
    options = argparse.Namespace(budget=2048, steps=64, host_gb=host_gb)
    gpu_decode.scout_rows(None, None, "qwen3-8b", 32768, options, lambda: True, 13)
    assert {about["batch"] for about in found} == {batch}
    assert {(about["full_batch"], about["beyond_full"]) for about in found} == {(13, batch > 13)}
    assert ("WARNING" in capsys.readouterr().out) == (batch < 13)
    assert {about["mapped_share"] for about in found} == {0.995}
    # The first variant again, as the last.
    first, *_, last = found
    assert {**first, "repeat": 1} == last and [x.get("repeat", 0) for x in found].count(1) == 1


def test_host_pages_are_not_filled_for_a_context_that_there_is_no_time_for(monkeypatch, tmp_path):
    """The second store takes as long as the first: more than what is left."""
    begun = []

    def scout_rows(writer, model, name, context, *_):
        begun.append(context)
        return 1000.0

    monkeypatch.setattr(gpu_decode, "scout_rows", scout_rows)
    monkeypatch.setattr(gpu_decode, "full_rows", lambda *_: 13)
    monkeypatch.setattr(gpu_decode, "DummyModel", lambda *_: None)
    monkeypatch.setattr(gpu_decode, "free_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    options = argparse.Namespace(
        out=tmp_path / "rows.jsonl", seconds=300.0, model=["qwen3-8b"], context=[32768, 65536],
        budget=2048, host_gb=96.0, steps=4,
    )  # fmt: skip
    gpu_decode.measure(options)
    assert begun == [32768]
    [row] = rows.read_rows(options.out)
    assert (row["context"], row["reason"]) == (65536, "no time left") and "absent" in row[
        "nvidia_smi"
    ]
