"""`sglang-scout doctor`: on this machine, and its messages if something is missing."""

import errno
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


def test_what_in_the_environment_ends_a_server(monkeypatch, tmp_path):
    use_sys(monkeypatch, tmp_path, {})
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp/".ljust(96, "t"))
    assert doctor.outcome(machine.check_environment).state == "failed", "too long for sockets"
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
    assert "--tmpfs /tmp" in machine.check_environment().fix
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert machine.check_environment().state == "ok"
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    check = machine.check_environment()
    assert check.state == "failed" and "unset MOONCAKE_PROTOCOL" in check.fix
    use_sys(monkeypatch, tmp_path)
    assert machine.check_environment().state == "ok", "it has an RDMA device"


def test_a_container_s_memory_limit_is_named(monkeypatch, tmp_path):
    use_sys(monkeypatch, tmp_path, {"fs/cgroup/memory.max": "max"})
    assert "limited" not in machine.check_memory().found
    use_sys(monkeypatch, tmp_path, {"fs/cgroup/memory.max": f"{3 << 30}"})
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2 << 30)
    check = machine.check_memory()
    assert "limited to 3.00 GiB" in check.found and "--memory" in check.fix


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
        (
            "0.5.23",
            "libcuda.so.1: cannot open",
            "failed",
            ["libcuda", "the driver lacks its library", "--gpus all"],
        ),
        (
            "0.5.23",
            "No module named common_ops",
            "failed",
            ["common_ops", "--force-reinstall sglang==0.5.23"],
        ),
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
    monkeypatch.setenv("SCOUT_UNTESTED_SGLANG", "1")
    state = "warning" if found == "0.4.0" else state
    assert doctor.check_sglang().state == state, "tried all the same"


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
        ('print("so"); print(\'["13.0", 13000, 1]\')', "ok", ["on NUMA node 1", "sees 1"]),
        (
            "print('[\"13.0\", 12080, false]')",
            "failed",
            ["built for CUDA 13.0; the driver 570.86.15 supports 12.8", "nvidia-driver-580-server"],
        ),
        ("print('[\"13.0\", 13000, 0]')", "warning", ["no driver or no device", "--gpus all"]),
        ("print('[null, 0, 0]')", "warning", ["built without CUDA", "--device cpu"]),
        ("raise SystemExit('no torch')", "warning", ["torch sees no CUDA device (no torch)"]),
        (machine.ASK_CUDA, "warning", ["no driver or no device"]),  # of this machine
    ],
)
def test_a_gpu_that_torch_can_or_cannot_use(monkeypatch, tmp_path, code, state, parts):
    if code == machine.ASK_CUDA and os.path.exists("/dev/nvidiactl"):
        pytest.skip("has a GPU")
    use_sys(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 17 2025"
    (tmp_path / "version").write_text(driver)
    monkeypatch.setattr(machine, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(machine, "ASK_CUDA", code)
    check = machine.check_gpu()
    assert check.state == state and all(part in f"{check.found} {check.fix}" for part in parts)


def test_a_hidden_gpu_and_one_whose_node_takes_no_memory(monkeypatch, tmp_path):
    use_sys(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.check_gpu().fix.startswith("unset CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert machine.bind_refusal(0) == "" and machine.check_cpus().state == "ok"
    monkeypatch.setattr(host_memory, "_mbind", lambda *call: errno.EPERM)
    check = machine.check_cpus()
    assert check.state == "warning" and "--cap-add SYS_NICE" in check.fix


def test_the_router_is_missed_only_where_it_runs(monkeypatch):
    monkeypatch.setattr(doctor, "_importable", lambda *_: Check("no module", "x", failed=True))
    check = doctor.check_router()
    assert check.state == "warning" and "pip install 'sglang-scout[router]'" in check.fix


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
