"""Placement of the demo's servers: the choice, their flags and their environments."""

import json
import sys
from pathlib import Path

import pytest

from servers import pd_cluster, placement
from servers.pd_cluster import PDCluster
from servers.placement import Placement, place
from sglang_scout.cli import machine
from sglang_scout.core.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import demo  # noqa: E402

ON_CPU = Placement("cpu", "cpu", 0)
ONE_GPU = Placement("cuda", "cuda", 1)
TWO_GPUS = Placement("cuda", "cuda", 2)
PREFILL_ON_CPU = Placement("cpu", "cuda", 1)
ALL = [ON_CPU, ONE_GPU, TWO_GPUS, PREFILL_ON_CPU]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("SCOUT_FORCE_CPU", "SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES",
                 "SGLANG_NCCL_SO_PATH", "MOONCAKE_PROTOCOL"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def machine_with(monkeypatch, tmp_path, *, gpus, mooncake=True, driver=True):
    """A machine with a driver, ``gpus`` that torch sees, and a mooncake with or without CUDA."""
    monkeypatch.setattr(placement, "DRIVER_NODES", (Path("/") if driver else tmp_path / "none",))
    monkeypatch.setattr(machine, "cuda_devices", lambda: (gpus, "" if gpus else "it said so"))
    monkeypatch.setattr(machine, "transfer_reads_device", lambda: mooncake)


def words(cluster, which):
    """A server's flags; of repeated ones the last, which applies."""
    command = cluster.servers[which].command[3:]
    found, at = {}, 0
    while at < len(command):
        bare = at + 1 == len(command) or command[at + 1].startswith("--")
        found[command[at]] = True if bare else command[at + 1]
        at += 1 if bare else 2
    return found


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "machine", "expected"),
    [
        ("auto", {"gpus": 0, "driver": False}, ON_CPU),
        ("auto", {"gpus": 0}, ON_CPU),
        ("auto", {"gpus": 1}, ONE_GPU),
        ("auto", {"gpus": 2}, TWO_GPUS),
        ("auto", {"gpus": 1, "mooncake": False}, PREFILL_ON_CPU),
        ("cpu", {"gpus": 2}, ON_CPU),
        ("cuda", {"gpus": 1, "driver": False}, ONE_GPU),
    ],
)
def test_the_device_that_is_taken(monkeypatch, tmp_path, wanted, machine, expected):
    machine_with(monkeypatch, tmp_path, **machine)
    assert place(wanted) == expected


def test_the_environment_can_ask_for_the_cpu(monkeypatch, tmp_path):
    machine_with(monkeypatch, tmp_path, gpus=1)
    for name in ("SCOUT_FORCE_CPU", "SGLANG_USE_CPU_ENGINE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert place("auto") == ON_CPU and place("cuda") == ONE_GPU


def test_cuda_without_a_device_is_an_error_that_names_the_way_out(monkeypatch, tmp_path, capsys):
    machine_with(monkeypatch, tmp_path, gpus=0)
    with pytest.raises(ConfigError, match=r"--device cuda: .*it said so.*--device cpu"):
        place("cuda")
    assert demo.main(["--device", "cuda"]) == 2 and "--device cpu" in capsys.readouterr().err


# -- the servers -----------------------------------------------------------------------------------


def demo_cluster(tmp_path, where, *arguments):
    args = demo.parse_arguments(["--model", "recall", *arguments])
    return demo.make_cluster(args, where, demo.RECALL_MODEL, tmp_path)


@pytest.mark.parametrize("where", ALL, ids=str)
def test_devices_and_environments(tmp_path, where):
    cluster = demo_cluster(tmp_path, where)
    for which, on in (("prefill", where.prefill), ("decode", where.decode)):
        server = cluster.servers[which]
        assert words(cluster, which)["--device"] == on
        assert server.env.get("SGLANG_USE_CPU_ENGINE") == ("1" if on == "cpu" else None)
        assert server.env.get("CUDA_VISIBLE_DEVICES") == ("" if on == "cpu" else None)
        assert "--attention-backend" not in server.command, "the plugin's and SGLang's choice"
    assert cluster.one_by_one == where.one_gpu_for_both
    cluster.stop()


def test_two_servers_leave_each_other_room(tmp_path):
    found = {}
    for where in ALL:
        cluster = demo_cluster(tmp_path, where)
        prefill, decode = (words(cluster, which) for which in ("prefill", "decode"))
        assert "--base-gpu-id" not in prefill
        assert decode.get("--base-gpu-id") == ("1" if where == TWO_GPUS else None)
        assert int(prefill["--max-total-tokens"]) == int(decode["--max-total-tokens"]) > 0
        found[where] = [float(x["--mem-fraction-static"]) for x in (prefill, decode)]
        cluster.stop()
    first, second = found[ONE_GPU]
    assert first + second * (1 - first) < 0.9, "nothing is left for activations and graphs"
    assert found[TWO_GPUS] == [0.8, 0.8]
    assert found[PREFILL_ON_CPU] == [found[ON_CPU][0], 0.8]


def test_the_demo_leaves_pages_to_the_cpu_on_a_gpu_too(tmp_path):
    for where in ALL:
        cluster = demo_cluster(tmp_path, where, "--budget", "256", "--concurrency", "16")
        prefill, decode = (words(cluster, which) for which in ("prefill", "decode"))
        of_prefill, of_decode = (json.loads(x["--kv-offload-config"]) for x in (prefill, decode))
        for config in (of_prefill, of_decode):
            assert config | demo.RECALL.config == config
        on_cpu = 256 * int(decode["--max-running-requests"])
        assert of_decode.get("resident_tokens") == (None if where == ON_CPU else on_cpu)
        assert ("prefill_digests" in of_prefill) == (where == PREFILL_ON_CPU)
        assert ("--chunked-prefill-size" in prefill) == (where.prefill == "cpu")
        cluster.stop()


@pytest.mark.parametrize("one_by_one", [True, False])
def test_servers_that_share_a_gpu_start_one_after_the_other(tmp_path, monkeypatch, one_by_one):
    cluster = PDCluster(tmp_path, log_dir=tmp_path, one_by_one=one_by_one, router=False)
    events = []
    for name, server in cluster.servers.items():
        monkeypatch.setattr(server, "start", lambda name=name: events.append(f"start {name}"))
    monkeypatch.setattr(
        pd_cluster, "wait_healthy", lambda server, *_: events.append(f"ready {server.name}")
    )
    cluster.start()
    turns = ["start prefill", "ready prefill", "start decode", "ready decode"]
    assert events == (turns if one_by_one else [turns[i] for i in (0, 2, 1, 3)])
    cluster.stop()
