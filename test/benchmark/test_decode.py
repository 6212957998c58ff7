"""``benchmark/decode``: a step that makes the host wait for the device is detected; contents of its rows."""

import argparse
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from benchmark.decode import check, gpu_decode, harness
from benchmark.decode.launches import of_layer
from benchmark.decode.model import SIZES
from sglang_scout.cli.step_model import Device, Work, offload_step
from sglang_scout.ops import triton
from sglang_scout.ops.doorbell import DeviceRing

interpreted = pytest.mark.skipif(
    not triton.interpreted(), reason="runs the device's step in the interpreter"
)


def test_waiting_is_an_error_within_the_block_alone(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", told.append)
    with harness.no_waiting("cuda:0"):
        assert told == ["error"]
    with pytest.raises(RuntimeError, match="synchronizing"), harness.no_waiting("cuda"):
        raise RuntimeError("called a synchronizing CUDA operation")
    with harness.no_waiting("cpu"):
        pass
    assert told == ["error", 1] * 2


@interpreted
def test_a_step_that_waits_fails_the_check(monkeypatch):
    pytest.importorskip("sglang_scout._native")

    def step(harness):
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(harness.Harness, "step", step)
    wrong = check.check("cpu")
    assert any("off: called a synchronizing CUDA operation" in line for line in wrong)


@interpreted
def test_a_check_ends_with_the_first_step_that_lacks_an_answer(monkeypatch):
    pytest.importorskip("sglang_scout._native")
    monkeypatch.setattr(DeviceRing, "faults", lambda _: ["no answer in time"])
    found = list(check.findings("cpu", 1, steps=3))
    assert [kind for kind, _ in found] == ["verified", "off"]
    assert all(len(wrong) == 1 and "no answer in time" in wrong[0] for _, wrong in found)


def test_steps_of_the_cpu_device(tmp_path):
    """In a separate process, which it pins to one CPU."""
    pytest.importorskip("sglang_scout._native")
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmark.decode.cpu_step", "--batch", "1", "--steps", "2"]
    subprocess.run([*command, "--out", str(path)], check=True, timeout=240, capture_output=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        device, work = Device(**row["device"]), Work(**row["work"])
        assert device.in_order and offload_step(work, device, 1, row["missing_share"]).us > 0


class HalfAStore:
    """The parts of a store that the variants need; ``one`` is a stand-in."""

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
    gpu_decode.scout_rows(None, None, "qwen3-8b", 32768, options, 13)
    assert {about["batch"] for about in found} == {batch}
    assert {(about["full_batch"], about["beyond_full"]) for about in found} == {(13, batch > 13)}
    assert ("WARNING" in capsys.readouterr().out) == (batch < 13)
    first, *_, last = found  # the first variant again, as the last
    assert {**first, "repeat": 1} == last


def test_the_drift_is_calibrated_with_the_stores_digests():
    pytest.importorskip("sglang_scout._native")
    size = SIZES["tiny"]
    store = harness.Store(
        size, pages=65, batch=1, budget_pages=8, dtype=torch.float32, device="cpu",
        cpus=sorted(os.sched_getaffinity(0))[:1], from_device=False,
    )  # fmt: skip
    try:
        assert 0.9 < gpu_decode.calibrated_rho(store, size, 64 * harness.PAGE, 8) < 1.0
    finally:
        store.close()


def test_launches_are_counted_by_layer_and_what_runs_on_the_host_is_none():
    class Seen(NamedTuple):
        key: str
        count: int
        self_device_time_total: float

    seen = [Seen("attend", 8, 40.0), Seen("aten::mm", 3, 0.0)]
    assert of_layer(seen, 4) == {"attend": [2.0, 10.0]}
