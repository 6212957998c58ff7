"""`sglang-scout doctor`: on this machine, and its messages if something is missing."""

import json
import os
import re
import resource
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from fake_sys import TWO_NODES, use_sys
from page_weights import forecast_weights
from sglang_scout.cli import checks as machine
from sglang_scout.cli import doctor, main
from sglang_scout.cli.checks import Check
from sglang_scout.core import numa
from sglang_scout.core.errors import WorkerError
from sglang_scout.core.forecast import save_weights
from sglang_scout.worker import host_memory


def test_this_machine_can_serve():
    """The tests need everything that a server needs, so a failed check here is a bug of the doctor."""
    code = (
        "import sys; from sglang_scout.cli import main; assert main(['doctor', '--json']) == 0;"
        "assert not {'sglang', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    checks = {check["name"]: check for check in result["checks"]}
    assert result["ok"] and all(check["state"] != "failed" for check in checks.values())
    worker = checks["CPU attention"]["values"]
    assert worker["right"] and worker["max_error"] <= machine.TOLERANCE
    assert worker["page_us"] > 0 and worker["batch_us"] > 0
    assert worker["isa"] == checks["native module"]["values"]["isa"]
    assert checks["sglang"]["values"]["version"] in checks["sglang"]["values"]["supported"]


def test_report_and_exit_code(monkeypatch, capsys):
    found = {"python": lambda: Check("3.11.0"), "huge pages": lambda: Check("none", "make some")}
    monkeypatch.setattr(doctor, "checks", lambda args: found)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "-> make some" in text and "this machine can serve; warnings: 1" in text
    assert "next: run sglang-scout plan" in text
    found["CPU attention"] = Mock(side_effect=WorkerError("process 1 ended with exit code 1"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "exit code 1\n" in text and "1 failed: this machine cannot serve; warnings: 1" in text
    assert "next: do what the lines marked ->" in text


def test_a_wrong_cpu_list_is_named(capsys):
    absent = max(os.sched_getaffinity(0)) + 1
    # An unset variable of a shell is not "all".
    for cpus, says in ((f"0-{absent}", f"may not run on CPU {absent}"), ("", "--cpus ''")):
        assert main(["doctor", "--cpus", cpus]) == 2
        assert says in capsys.readouterr().err


def test_variables_without_which_a_server_ends(monkeypatch, tmp_path):
    use_sys(monkeypatch, tmp_path, {})
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setattr("tempfile.tempdir", "/tmp/".ljust(96, "t"))
    assert doctor.outcome(machine.check_environment).state == "failed", "too long for sockets"
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert machine.check_environment().state == "ok"
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    check = machine.check_environment()
    assert check.state == "warning" and check.found.startswith("SGLANG_USE_CPU_ENGINE is not set")
    assert "scripts/cpu_env.sh" in check.fix and "export SGLANG_USE_CPU_ENGINE=1" in check.fix
    use_sys(monkeypatch, tmp_path)
    assert machine.check_environment().state == "ok", "a GPU's server does without"


@pytest.mark.parametrize(
    ("policy", "keys", "state", "parts"),
    [
        ("sparda", {"forecast_file": "w"}, "ok", ["computes no attention", "of 1024", "3 layers"]),
        ("sparda", {}, "failed", ["forecast_file", "make one with scripts/train_forecast.py"]),
        ("hgca", {}, "ok", ["from outside the window", "budget of 4096 tokens"]),
        ("rheo", {"pilot_file": "w"}, "failed", ["holds forecast weights"]),
        ("none", {}, "failed", ["choose one of hgca"]),
    ],
)
def test_what_a_policy_needs(monkeypatch, tmp_path, policy, keys, state, parts):
    monkeypatch.chdir(tmp_path)
    save_weights(forecast_weights(), "w")
    check = doctor.outcome(lambda: doctor.check_policy(policy, json.dumps(keys)))
    assert check.state == state
    assert all(part in f"{check.found} {check.fix}" for part in parts), check


@pytest.mark.parametrize(
    ("found", "error", "state", "parts"),
    [
        ("0.4.0", "", "failed", ["0.4.0, expected 0.5.23 or 0.5.15.post1", "sglang==0.5.23"]),
        ("0.5.23", "libcuda.so.1: cannot open", "failed", ["libcuda", "scripts/no_driver.sh"]),
        ("0.5.23", "No module named common_ops", "failed", ["common_ops", "install SGLang again"]),
        ("0.5.15.post1", "libcuda.so.1: cannot open", "ok", []),
    ],
)
def test_sglang_s_release_and_the_library_of_the_driver(monkeypatch, found, error, state, parts):
    done = subprocess.CompletedProcess([], bool(error), "", error)
    monkeypatch.setattr(doctor, "version", lambda name: found)
    monkeypatch.setattr(doctor, "python", lambda *_: done)
    check = doctor.check_sglang()
    assert check.state == state
    assert all(part in f"{check.found} {check.fix}" for part in parts), check


def test_a_plugin_that_sglang_would_skip(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    check = doctor.check_plugin()
    assert check.state == "failed" and "SGLANG_PLUGINS" in check.fix
    monkeypatch.setenv("SGLANG_PLUGINS", "other, scout")
    assert doctor.check_plugin().state == "ok"
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    assert "no entry point" in doctor.check_plugin().found


def test_a_module_without_its_libraries_names_the_packages(monkeypatch, tmp_path):
    (tmp_path / "half_there.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor._importable("half_there", "sglang-router", "libibverbs1 librdmacm1")
    assert check.state == "failed" and "libibverbs.so.1" in check.found
    assert check.fix == "apt-get install -y libibverbs1 librdmacm1"
    check = doctor._importable("not_there_at_all", "no-such-distribution")
    assert check.fix == "pip install no-such-distribution"
    monkeypatch.setattr(machine, "TIMEOUT_S", 0.001)
    assert "no answer within 0.001 s" in doctor.check_native().found


@pytest.mark.parametrize("wrong", [0.1, np.nan])
def test_a_wrong_answer_is_noticed(wrong, monkeypatch):
    plainly = machine.attend_plainly

    def spoiled(*args):
        out, lse = plainly(*args)
        lse[-1, -1] += wrong
        return out, lse

    monkeypatch.setattr(machine, "attend_plainly", spoiled)
    check = machine.check_worker(sorted(os.sched_getaffinity(0))[:1])
    assert check.state == "failed" and "exceeds the tolerance" in check.found


def test_two_nodes_a_gpu_and_a_quota(monkeypatch, tmp_path):
    use_sys(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(15)))
    assert numa.nvidia_gpus() == ["0000:01:00.0"] and numa.cpu_quota() is None
    check = machine.check_cpus()
    text = doctor.report({"cpus": check})
    assert text.splitlines()[1:4] == [
        "    NUMA node 0: CPUs 0-3,8-11, 2.00 GiB, 1.00 GiB free, distances 10 21",
        "    NUMA node 1: CPUs 4-7,12-15, 4.00 GiB, 3.00 GiB free, distances 21 10",
        "    CPUs of a decode server on GPU 0000:01:00.0:",
    ]
    assert re.search("\n      5-7 +attention threads, one each +one per core of NUMA node 1", text)
    node = {"node": 1, "cpus": [4, 5, 6, 7, 12, 13, 14, 15], "distances": [21, 10]}
    sizes = {"total_bytes": 4 << 30, "free_bytes": 3 << 30}
    assert check.state == "ok" and check.values["numa_nodes"][1] == node | sizes
    [use] = machine.check_cpus([0, 1]).values["uses"]
    assert use["gpus"] == ["0000:01:00.0"]
    assert [row["cpus"] for row in use["rows"]] == ["0-1", "2-7,10-14", "8-9", "15"]
    monkeypatch.setattr(host_memory, "_SYS_MM", tmp_path / "kernel/mm")
    pages = {"free_pool_pages": 64, "shmem_enabled": "advise"}
    assert machine.check_hugepages().state == "ok" and machine.check_hugepages().values == pages
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    check = machine.check_cpus()
    assert check.state == "warning" and "CPUs near the GPU (4-7,12-15)" in check.found
    use_sys(monkeypatch, tmp_path, {"fs/cgroup/cpu.max": "150000 100000"})
    check = machine.check_cpus()
    assert check.state == "warning" and "CPU quota is 1.5" in check.found


@pytest.mark.parametrize(
    ("code", "state", "parts"),
    [
        ("print('so'); print(1)", "ok", ["0000:01:00.0 on NUMA node 1", "sees 1", "--device cuda"]),
        ("print(0)", "warning", ["no CUDA device (no driver or no device)", "--device cpu"]),
        ("raise SystemExit('no torch')", "warning", ["torch sees no CUDA device (no torch)"]),
    ],
)
def test_a_gpu_that_torch_can_or_cannot_use(monkeypatch, tmp_path, code, state, parts):
    use_sys(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "COUNT_DEVICES", code)
    check = machine.check_gpu()
    assert check.state == state and all(part in f"{check.found} {check.fix}" for part in parts)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("rdma", [False, True])
def test_locked_memory_is_needed_by_a_gpu_and_by_rdma(monkeypatch, tmp_path, gpu, rdma):
    wanted = ("bus/pci" if gpu else "-", "class/infiniband" if rdma else "-")
    files = {name: text for name, text in TWO_NODES.items() if name.startswith(wanted)}
    use_sys(monkeypatch, tmp_path, files)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    check = machine.check_locked_memory()
    assert check.state == ("warning" if gpu or rdma else "ok")
    assert ("--device cuda page-locks" in check.fix) == gpu
    assert ("MOONCAKE_PROTOCOL=tcp" in check.fix) == rdma
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert machine.check_locked_memory().state == "ok"


def test_a_mooncake_without_cuda_matters_beside_a_gpu(monkeypatch, tmp_path):
    versions = {doctor.pinned(f"mooncake-transfer-engine-{x}") for x in ("cuda13", "non-cuda")}
    assert len(versions) == 1 and re.fullmatch(r"[\w.]+", versions.pop()), "both of one version"
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)  # other tests use it
    monkeypatch.setattr(doctor, "_importable", lambda *_: Check("0.3"))
    module = package / "engine.cpython-312-x86_64-linux-gnu.so"
    module.write_bytes(b"\x7fELF\0memcpy\0")
    use_sys(monkeypatch, tmp_path, {})
    assert doctor.check_mooncake().state == "ok"
    use_sys(monkeypatch, tmp_path)
    check = doctor.check_mooncake()
    assert check.state == "warning" and "without CUDA" in check.found and "prefill" in check.fix
    module.write_bytes(b"\x7fELF\0cudaMemcpy\0")
    assert doctor.check_mooncake().state == "ok"
