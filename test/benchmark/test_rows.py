"""Rows, page streams and plots of the benchmarks, and that each benchmark runs. Never asserts on time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark import plot, rows
from benchmark.kernels import kv_pool
from benchmark.kernels.read_loop import ReadLoop, ReadLoopError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared() -> rows.Row:
    return rows.environment("test", ("numpy", "no-such-package"))


def run_benchmark(module: str, folder: Path) -> list[rows.Row]:
    path = folder / "rows.jsonl"
    command = [sys.executable, "-m", f"benchmark.{module}", "--quick", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return rows.read_rows(path)


@pytest.mark.parametrize(
    ("samples", "unstable"),
    [([10.0, 10.2, 10.4, 10.1], False), ([10.0, 13.0, 10.0, 9.0], True), ([5.0], False)],
)
def test_a_spread_over_ten_percent_is_called_unstable(samples, unstable):
    found = rows.summary(samples)
    assert found["samples_us"] == samples
    assert found["median_us"] == pytest.approx(np.median(samples))
    assert found["unstable"] is unstable is (found["spread"] > 0.1)


def test_rows_are_written_as_they_come_behind_those_of_earlier_runs(tmp_path, shared):
    path = tmp_path / "new" / "rows.jsonl"
    for begun in range(2):
        writer = rows.Writer(path, shared, append=True)
        writer.add("fast", threads=2, **rows.summary([1.0, 1.1]))
        assert len(path.read_text().splitlines()) == 2 * begun + 1
        writer.add("other", "absent", "not installed")
        writer.close()
        with path.open("a") as torn:
            torn.write('{"impl": "cut sh')  # as left by a killed run
    rows.Writer(path, shared, append=True).close()
    assert rows.read_rows(path)[2:] == writer.rows and len(rows.read_rows(path)) == 4
    versions = writer.rows[0]["versions"]
    assert (versions["no-such-package"], versions["numpy"]) == ("absent", np.__version__)
    rows.Writer(path, shared).close()
    assert rows.read_rows(path) == []


def test_a_bad_line_is_named(tmp_path, shared):
    path = tmp_path / "rows.jsonl"
    good = json.dumps({**shared, "impl": "x", "status": "absent", "reason": "why"})
    wrong = {"{": "not JSON", "[]": "not an object", '{"impl": 1}': "no benchmark, "}
    for bad, what in wrong.items():
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match="rows.jsonl:2: .*" + what):
            rows.read_rows(path)


@pytest.mark.parametrize("dirty", [False, True])
def test_rows_of_a_bundle_name_the_commit_that_was_packed(monkeypatch, dirty):
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123abc" + "-dirty" * dirty)
    found = rows.environment("test")
    assert (found["commit"], found["dirty"]) == ("0123abc", dirty)


def test_a_page_comes_back_only_after_all_others():
    shape = kv_pool.Shape("", B=1, R=5, H=1, G=1, D=16)
    inputs = kv_pool.Inputs(kv_pool.KvPool(2 * 8 * shape.page_bytes), shape)
    taken = [page for at in inputs.take(9) for page in inputs.pages(at)[0].tolist()]
    for begin in range(len(taken) - 7):
        assert sorted(taken[begin : begin + 8]) == list(range(8))


def test_the_read_loop_reads_every_line_once():
    cpus = sorted(os.sched_getaffinity(0))
    try:
        loop = ReadLoop(cpus)
    except ReadLoopError as error:
        pytest.skip(str(error))
    page_bytes, P = 4096, 64
    memory = np.random.default_rng(0).integers(0, 1 << 63, 2 * P * page_bytes // 8 + 8, np.uint64)
    memory = memory[-memory.ctypes.data % 64 // 8 :][: 2 * P * page_bytes // 8]
    k, v = memory.reshape(2, P, -1)
    ids = np.array([5, 63, 0, 5, 17], np.int32)
    expected = int(np.bitwise_xor.reduce(np.concatenate([k[ids], v[ids]]), axis=None))
    for threads in range(1, len(cpus) + 1):
        ns, checksum = loop.pages_ns(k.ctypes.data, v.ctypes.data, page_bytes, ids, threads)
        assert ns > 0 and checksum == expected


def test_a_file_of_rows_makes_a_picture_and_one_of_others_does_not(tmp_path, capsys):
    results, path = ROOT / "docs" / "results", tmp_path / "x.png"
    for name in ("predictions", "study_budgets", "paper_figures"):
        assert plot.main([str(results / f"{name}.jsonl"), str(path)]) == 0
        assert path.stat().st_size > 10_000
    assert plot.main([str(results / "join.jsonl"), str(path)]) == 1
    assert "no measured rows of study or predictions" in capsys.readouterr().err


def test_cpu_attention_runs(tmp_path):
    found = run_benchmark("kernels.cpu_attention", tmp_path)
    by_impl = {row["impl"]: row for row in found}
    native = f"native-{found[0]['native_best_isa']}"
    for impl in (native, "read", "read-sequential"):
        row = by_impl[impl]
        assert row["status"] == "ok", row["reason"]
        call_bytes = 2 * 2 * row["batch"] * row["pages"] * row["page_size"] * row["H"] * row["D"]
        assert row["gb_per_s"] == pytest.approx(
            call_bytes / row["median_us"] / 1e3, rel=0.01, abs=1e-4
        )
    assert all(row["max_abs_error"] <= 1e-4 for row in found if row["impl"] == native)


def test_ring_latency_runs(tmp_path):
    found = run_benchmark("ring.ring_latency", tmp_path)
    if len(os.sched_getaffinity(0)) < 2:
        assert [row["status"] for row in found] == ["skipped"]
        return
    assert {row["impl"] for row in found} == {"ring", "client"}
    for row in found:
        assert row["status"] == "ok", row["reason"]
        assert row["median_us"] <= row["p99_us"] <= row["max_us"]
