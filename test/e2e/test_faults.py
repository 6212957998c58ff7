"""One pair of servers under load, aborts, refused requests and a kill. Worker faults: test_worker_faults.py."""

import os
import signal
import time
from functools import partial

import pytest

from clients import InFlight, Load, watch
from harness import Holdings, PDCluster, random_prompts, scheduler_pid, wait_idle, wait_until
from servers.server_process import children_of, title_of


def test_a_hundred_requests_with_aborts_leave_nothing(servers):

    def run(count, seed):
        with Load(servers, 12, random_share=1.0, seed=seed) as load:
            wait_until("answers", load.more_answered(count), 300)
        wait_idle(servers)
        assert not load.lost
        return load.dropped

    run(40, seed=20)  # caches, thread pools and allocators reach their size
    before, refused = Holdings.of(servers), servers.kv_offload()["worker"]["refused"]
    assert run(80, seed=21) >= 3
    assert not Holdings.of(servers).beyond(before)
    state = servers.kv_offload()
    assert state["resident_pages"] == 0
    assert state["cpu_pages"] > 0 and state["worker"]["refused"] == refused


def test_after_sigterm_a_running_request_completes_and_the_server_ends(servers):
    """More in test_process_faults.py."""
    steps = servers.kv_offload("radix")["steps"]
    send = partial(servers.ask_pair, which="radix")
    running = InFlight(send, random_prompts([600]), [120])
    wait_until("it runs", lambda: servers.kv_offload("radix")["steps"] > steps, 30)
    watch(servers.server_url("radix"))
    server = servers.servers["radix"]
    server.signal(signal.SIGTERM)
    [outcome] = running.outcomes(20)
    assert outcome.answer and len(outcome.answer.output_ids) == 120, outcome
    assert server.wait(20), "it still runs"


def test_killing_the_scheduler_leaves_no_process(servers):
    worker = servers.kv_offload()["worker"]["pid"]
    scheduler = scheduler_pid(servers)
    assert worker in servers.processes() and scheduler in servers.processes()
    os.kill(scheduler, signal.SIGKILL)
    wait_until("the worker has ended", lambda: worker not in servers.processes(), 30)
    assert servers.stop() == {}, "something had to be killed by hand"


@pytest.mark.slow
def test_a_scheduler_whose_launcher_is_killed_while_it_starts_ends(tiny_model, tmp_path):
    scout = ["--kv-offload", "scout"]
    cluster = PDCluster(tiny_model(), log_dir=tmp_path, server_args=scout, router_args=None)
    server = cluster.servers["decode"]
    try:
        server.start()
        wait_until("the launcher has children", lambda: len(children_of(server.pid)) >= 2, 60)
        children = children_of(server.pid)
        server.signal(signal.SIGKILL)
        server.wait(10)
        # Imports take some seconds before code of this project can check the parent.
        time.sleep(20)
        titles = [*map(title_of, children), *cluster.processes().values()]
        assert not [t for t in titles if "::scheduler" in t or "sglang_scout.worker" in t]
    finally:
        cluster.stop()
