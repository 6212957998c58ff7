"""A scheduler ends with its launcher, also during startup."""

from __future__ import annotations

import signal
import time

import pytest

from harness import PDCluster, wait_until
from servers.processes import children_of, process_title


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

        # Imports take some seconds before code of this project can check the parent.
        time.sleep(20)
        assert not still_here()
    finally:
        cluster.stop()
