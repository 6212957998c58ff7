"""`sglang-scout doctor`: on this machine, and its messages if something is missing."""

import json
import os
import re
import resource
import subprocess
import sys

import numpy as np
import pytest

from fake_sys import TWO_NODES, use_sys
from page_weights import forecast_weights
from sglang_scout.cli import doctor, machine, main, policy_check, worker_check
from sglang_scout.core.errors import ConfigError, WorkerError
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
    assert checks["queries"]["state"] == "ok"
    worker = checks["CPU attention"]["values"]
    assert worker["right"] and worker["max_error"] <= worker_check.TOLERANCE
    assert worker["page_us"] > 0 and worker["batch_us"] > 0
    assert worker["isa"] == checks["native module"]["values"]["isa"]
    assert checks["sglang"]["values"]["version"] in checks["sglang"]["values"]["supported"]


def test_report_and_exit_code(monkeypatch, capsys):
    fine = doctor.Check("python", "ok", "3.11.0")
    slow = doctor.Check("huge pages", "warning", "none", "make some")
    broken = doctor.Check("CPU attention", "failed", "no", "repair it")
    for code, found in ((0, [fine, slow]), (1, [fine, slow, broken])):
        monkeypatch.setattr(doctor, "checks", lambda cpus, f=found: [lambda r=r: r for r in f])
        assert main(["doctor"]) == code
        text = capsys.readouterr().out
        assert all(check.fix in text for check in found)
        assert ("cannot serve" in text) == bool(code) and "warnings: 1" in text
        last = text.splitlines()[-1]
        assert last.startswith("next: ") and ("sglang-scout plan" in last) == (code == 0)


def test_variables_without_which_a_server_ends(monkeypatch):
    monkeypatch.setattr(doctor.machine, "nvidia_gpus", lambda: [])
    monkeypatch.setattr(doctor.machine, "has_rdma", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    assert doctor.check_environment().state == "ok"
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    check = doctor.check_environment()
    assert check.state == "warning" and check.found.startswith("SGLANG_USE_CPU_ENGINE is not set")
    assert "scripts/cpu_env.sh" in check.fix and "export SGLANG_USE_CPU_ENGINE=1" in check.fix
    monkeypatch.setattr(doctor.machine, "nvidia_gpus", lambda: ["one"])
    assert doctor.check_environment().state == "ok", "a GPU's server does without"


def test_a_folder_whose_path_is_too_long_for_sockets(monkeypatch, tmp_path):
    for size, states in ((95, ("ok", "warning")), (96, ("failed",))):
        folder = f"{tmp_path}/".ljust(size, "t")
        os.mkdir(folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        check = doctor.check_environment()
        assert check.state in states
    assert check.found.startswith(f"TMPDIR={folder}: its 96 bytes") and "95" in check.fix


def test_a_wrong_cpu_list_is_named(capsys):
    absent = max(os.sched_getaffinity(0)) + 1
    assert main(["doctor", "--cpus", f"0-{absent}"]) == 2
    assert f"may not run on CPU {absent}" in capsys.readouterr().err
    assert main(["doctor", "--cpus", ""]) == 2, "an unset variable of a shell is not 'all'"
    assert "--cpus ''" in capsys.readouterr().err


def test_what_does_not_answer_has_failed(monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.001)
    check = doctor.check_native()
    assert check.state == "failed" and "no answer within 0.001 s" in check.found


def test_another_processor_cannot_serve(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    check = doctor.check_worker([0])
    assert check.state == "failed" and check.found.startswith("this machine is aarch64: the ring")
    assert check.fix == "serve on x86_64"


def test_what_a_policy_needs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "TIMEOUT_S", 600)  # on a busy machine
    monkeypatch.setattr(doctor, "checks", lambda cpus: [])
    path = tmp_path / "w.npz"
    save_weights(forecast_weights(), str(path))
    config = ["--kv-offload-config", json.dumps({"forecast_file": str(path)})]
    for code, words, parts in (
        (
            0,
            config,
            ["the CPU computes no attention", "budget of 1024 tokens", f"{path}, of", "3 layers"],
        ),
        (1, [], ["failed", "forecast_file", "-> make one with scripts/train_forecast.py"]),
    ):
        assert main(["doctor", "--kv-offload", "sparda", *words]) == code
        text = capsys.readouterr().out
        assert all(part in text for part in parts), text


def test_what_other_policies_need(tmp_path):
    found = policy_check.requirements("hgca", "{}")
    assert found["worker"] and "from outside the window" in found["missing"] and not found["files"]
    assert found["budget_tokens"] == 4096
    save_weights(forecast_weights(), str(tmp_path / "w"))
    for name, keys, part in (
        ("rheo", {"pilot_file": str(tmp_path / "w")}, "holds forecast weights"),
        ("none", {}, "choose one of hgca"),
    ):
        with pytest.raises(ConfigError, match=part):
            policy_check.requirements(name, json.dumps(keys))


def test_another_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "0.4.0")
    check = doctor.check_sglang()
    assert check.state == "failed"
    assert "0.4.0, expected 0.5.23 or 0.5.15.post1" in check.found
    assert "pip install sglang==0.5.23" in check.fix


@pytest.mark.parametrize(("found", "state"), [("0.5.23", "failed"), ("0.5.15.post1", "ok")])
def test_without_the_drivers_library_a_newer_sglang_does_not_start(monkeypatch, found, state):
    error = "ImportError: libcuda.so.1: cannot open shared object file"
    done = subprocess.CompletedProcess([], 1, "", error)
    monkeypatch.setattr(doctor, "version", lambda name: found)
    monkeypatch.setattr(doctor, "_python", lambda *words: done)
    check = doctor.check_sglang()
    assert check.state == state
    assert state == "ok" or ("libcuda" in check.found and "scripts/no_driver.sh" in check.fix)


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
    check = doctor._importable("transfer", "half_there", "sglang-router", "libibverbs1 librdmacm1")
    assert check.state == "failed" and "libibverbs.so.1" in check.found
    assert check.fix == "apt-get install -y libibverbs1 librdmacm1"
    check = doctor._importable("transfer", "not_there_at_all", "no-such-distribution")
    assert check.fix == "pip install no-such-distribution"


def test_a_worker_that_does_not_start_or_is_wrong(monkeypatch):
    def refuse(cpus):
        raise WorkerError("process 1 ended with exit code 1")

    monkeypatch.setattr(worker_check, "compare_and_time", refuse)
    check = doctor.check_worker([0])
    assert check.state == "failed" and "exit code 1" in check.found and check.fix
    wrong = worker_check.Result(
        False, "the result is off by 1", 0.1, 4, 16, 1.0, 1.0, 1.0, "avx2", "ipc://@x"
    )
    monkeypatch.setattr(worker_check, "compare_and_time", lambda cpus: wrong)
    check = doctor.check_worker([0])
    assert check.state == "failed" and "off by 1" in check.found


def of_other_pages(out, lse):
    return np.roll(out, 1, axis=0), np.roll(lse, 1, axis=0)


def with_a_nan_in_lse(out, lse):
    lse[-1, -1] = np.nan
    return out, lse


@pytest.mark.parametrize("spoil", [of_other_pages, with_a_nan_in_lse])
def test_a_wrong_answer_is_noticed(spoil, monkeypatch):
    plainly = worker_check.attend_plainly
    monkeypatch.setattr(worker_check, "attend_plainly", lambda *args: spoil(*plainly(*args)))
    result = worker_check.compare_and_time(sorted(os.sched_getaffinity(0))[:1])
    assert not result.right and "exceeds the tolerance" in result.problem


def test_two_nodes_a_gpu_and_a_quota(monkeypatch, tmp_path):
    use_sys(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(15)))
    assert machine.nvidia_gpus() == [machine.Gpu("0000:01:00.0", 1)]
    assert machine.cpu_quota() is None
    assert machine.has_rdma()
    check = doctor.check_cpus()
    text = doctor.report([check])
    for line in (
        "NUMA node 0: CPUs 0-3,8-11, 2.00 GiB, 1.00 GiB free, distances 10 21",
        "NUMA node 1: CPUs 4-7,12-15, 4.00 GiB, 3.00 GiB free, distances 21 10",
        "CPUs of a decode server on GPU 0000:01:00.0:",
    ):
        assert f"\n    {line}\n" in text
    assert re.search("\n      5-7 +attention threads, one each +one per core of NUMA node 1", text)
    assert check.state == "ok" and check.values["numa_nodes"][1] == {
        "node": 1, "cpus": [4, 5, 6, 7, 12, 13, 14, 15], "total_bytes": 4 << 30,
        "free_bytes": 3 << 30, "distances": [21, 10],
    }  # fmt: skip
    [use] = check.values["uses"]
    assert use["gpus"] == ["0000:01:00.0"]
    assert [row["cpus"] for row in use["rows"]] == ["5-7", "13-14", "4,12", "0-3,8-11", "15"]
    [use] = doctor.check_cpus([0, 1]).values["uses"]
    assert [row["cpus"] for row in use["rows"]] == ["0-1", "2-7,10-14", "8-9", "15"]
    monkeypatch.setattr(host_memory, "_SYS_MM", tmp_path / "kernel/mm")
    check = doctor.check_hugepages()
    assert check.state == "ok"
    assert check.values == {"free_pool_pages": 64, "shmem_enabled": "advise"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    check = doctor.check_cpus()
    assert check.state == "warning" and "CPUs near the GPU (4-7,12-15)" in check.found
    use_sys(monkeypatch, tmp_path, {"fs/cgroup/cpu.max": "150000 100000"})
    check = doctor.check_cpus()
    assert check.state == "warning" and "CPU quota is 1.5" in check.found


@pytest.mark.parametrize(
    ("seen", "state", "parts"),
    [
        ((1, ""), "ok", ["0000:01:00.0 on NUMA node 1", "torch sees 1", "--device cuda"]),
        ((0, "no driver"), "warning", ["torch sees no CUDA device (no driver)"]),
    ],
)
def test_a_gpu_that_torch_can_or_cannot_use(monkeypatch, tmp_path, seen, state, parts):
    use_sys(monkeypatch, tmp_path)
    monkeypatch.setattr(machine, "cuda_devices", lambda: seen)
    check = doctor.check_gpu()
    assert check.state == state and all(part in check.found for part in parts)
    assert ("--device cpu" in check.fix) == (state == "warning")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("rdma", [False, True])
def test_locked_memory_is_needed_by_a_gpu_and_by_rdma(monkeypatch, tmp_path, gpu, rdma):
    wanted = ("bus/pci" if gpu else "-", "class/infiniband" if rdma else "-")
    files = {name: text for name, text in TWO_NODES.items() if name.startswith(wanted)}
    use_sys(monkeypatch, tmp_path, files)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    check = doctor.check_locked_memory()
    assert check.state == ("warning" if gpu or rdma else "ok")
    assert ("--device cuda page-locks" in check.fix) == gpu
    assert ("MOONCAKE_PROTOCOL=tcp" in check.fix) == rdma
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert doctor.check_locked_memory().state == "ok"


def test_both_mooncakes_are_of_one_version():
    versions = {doctor.pinned(f"mooncake-transfer-engine-{x}") for x in ("cuda13", "non-cuda")}
    assert len(versions) == 1 and re.fullmatch(r"[\w.]+", versions.pop())


def test_a_mooncake_without_cuda_matters_beside_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_importable", lambda *_: doctor.Check("mooncake", "ok", "0.3"))
    use_sys(monkeypatch, tmp_path, {})
    monkeypatch.setattr(machine, "transfer_reads_device", lambda: False)
    assert doctor.check_mooncake().state == "ok"
    use_sys(monkeypatch, tmp_path)
    check = doctor.check_mooncake()
    assert check.state == "warning" and "without CUDA" in check.found and "prefill" in check.fix
    monkeypatch.setattr(machine, "transfer_reads_device", lambda: True)
    assert doctor.check_mooncake().state == "ok"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('a warning'); print(3)", (3, "")),
        ("print(0)", (0, "no driver or no device")),
        ("raise SystemExit('no torch')", (0, "no torch")),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(monkeypatch, code, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "COUNT_DEVICES", code)
    assert machine.cuda_devices() == expected


def test_whether_mooncake_can_read_a_device(monkeypatch, tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)  # other tests use it
    assert not machine.transfer_reads_device()
    module = package / "engine.cpython-312-x86_64-linux-gnu.so"
    module.write_bytes(b"\x7fELF\0memcpy\0")
    assert not machine.transfer_reads_device()
    module.write_bytes(b"\x7fELF\0cudaMemcpy\0")
    assert machine.transfer_reads_device()
