"""The whole deployment dies with the process that started it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import PDCluster, wait_until
from servers.processes import children_of, process_title, processes_of

LAUNCHER = """
import json, sys, time
sys.path.insert(0, sys.argv[3])
from servers.pd_cluster import PDCluster
cluster = PDCluster(sys.argv[1], log_dir=sys.argv[2], server_args=["--kv-offload", "scout"])
cluster.start()
answer = cluster.generate([[1, 2, 3] * 50], max_new_tokens=4)[0]
sessions = [server.pid for server in cluster.all_servers()]
print(json.dumps({"id": cluster.cluster_id, "sessions": sessions, "scratch": cluster.scratch_dir,
                  "worker": cluster.kv_offload()["worker"]["pid"],
                  "tokens": len(answer.output_ids)}), flush=True)
time.sleep(600)
"""


@pytest.mark.slow  # test_faults.py ends servers in the same way, test/servers a launcher
def test_nothing_outlives_the_process_that_started_it(tiny_model, tmp_path):
    """SIGKILL of the launcher: servers, their children, the CPU worker and the router all end."""
    command = [sys.executable, "-c", LAUNCHER, str(tiny_model()), str(tmp_path)]
    command.append(str(Path(__file__).resolve().parents[1]))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        line = launcher.stdout.readline()
        launcher.kill()
        assert line, "the cluster did not start; see the launcher's message above"
    started = json.loads(line)
    assert started["tokens"] == 4
    wait_until(
        "all processes are gone",
        lambda: not processes_of(started["id"], started["sessions"]),
        20,
    )
    # By its pid too, in case it is neither in our sessions nor shows its environment. An ended process
    # that nobody has waited for yet has an empty command line.
    assert process_title(started["worker"]) == ""
    shutil.rmtree(started["scratch"])  # sockets of SGLang, which the launcher would have removed


@pytest.mark.slow
def test_a_scheduler_whose_launcher_is_killed_while_it_starts_ends(tiny_model, tmp_path):
    scout = ["--kv-offload", "scout"]
    cluster = PDCluster(tiny_model(), log_dir=tmp_path, server_args=scout, router=False)
    server = cluster.servers["decode"]
    try:
        server.start()
        wait_until("the launcher has children", lambda: len(children_of(server.pid)) >= 2, 60)
        children = children_of(server.pid)
        server.signal(signal.SIGKILL)
        server.wait(10)

        def still_here():
            titles = [process_title(pid) for pid in {*children, *cluster.processes()}]
            return [t for t in titles if "::scheduler" in t or "sglang_scout.worker" in t]

        # They import for some seconds before anything of this project can look at the parent.
        time.sleep(20)
        assert not still_here()
    finally:
        cluster.stop()
