"""``benchmark/decode``: a step that makes the host wait for the device is detected; contents of its rows."""

import argparse
import os
from unittest import mock

import numpy as np
import pytest
import torch

from benchmark import device, rows
from benchmark.decode import check, gpu_decode, harness
from sglang_scout.ops import triton

interpreted = pytest.mark.skipif(
    not triton.interpreted(), reason="runs the device's step in the interpreter"
)


@interpreted
def test_a_step_that_waits_fails_the_check(monkeypatch):
    error = RuntimeError("called a synchronizing CUDA operation")
    monkeypatch.setattr(harness.Harness, "step", mock.Mock(side_effect=error))
    wrong = check.check("cpu")
    assert any("off: called a synchronizing CUDA operation" in line for line in wrong)


def measurement(monkeypatch, **changes):
    """At its size in the interpreter, which is faked here where there is none."""
    monkeypatch.setattr(device, "device", lambda: "cpu")
    parser = argparse.ArgumentParser()
    gpu_decode.add_options(parser)
    options = parser.parse_args([])
    vars(options).update(gpu_decode.REHEARSAL | gpu_decode.INTERPRETED | changes)
    writer = rows.Writer(None, rows.environment("gpu_decode"))
    return gpu_decode.Measurement(writer, options)


def test_nothing_is_measured_where_the_device_holds_as_many_requests(monkeypatch, capsys):
    found = measurement(monkeypatch, full_gb=0.006)
    assert found.run() == 1
    (row,) = found.writer.rows
    assert row["status"] == "skipped" and "holds 8 by itself" in row["reason"]
    assert "ABORTED" in capsys.readouterr().out


@interpreted
def test_more_requests_than_the_host_holds_share_its_pages(monkeypatch):
    """Each has pages of its own for what it decodes, and the drift brings the missing ones to Figure 6's share."""
    found = measurement(monkeypatch, requests=8, warm_up=4)
    size, page = found.size, gpu_decode.PAGE
    sizes = {"pages": found.host_pages, "batch": 8, "budget_pages": 4, "dtype": torch.float32}
    store = harness.Store(size, **sizes, device="cpu", cpus=sorted(os.sched_getaffinity(0))[:1])
    tables, step = [], harness.Harness.step

    def noted(self):
        tables.append(self.pages)
        step(self)

    monkeypatch.setattr(harness.Harness, "step", noted)
    try:
        found.rho = gpu_decode.calibrated_rho(store, 512, 4)
        assert 0.9 < found.rho < 1.0
        found.simulated_row(store, 512)
    finally:
        store.close()
    (row,) = found.writer.rows
    assert row["status"] == "ok", row["reason"]
    assert row["digest"] == "rotated-2" and row["batch"] == 8 > found.batch(512)
    assert row["simulated"].endswith("8 requests over the pages of 6")
    assert row["cpu_compute_ratio"] > 0
    pages, of_context = tables[0], 512 // page
    context, own = pages[:, :of_context], pages[:, of_context:]
    assert len(np.unique(own)) == own.size and not np.isin(own, context).any()
    assert all(len(set(row)) == of_context for row in context.tolist())
    assert len(np.unique(context)) < context.size, "some pages are of several requests"
