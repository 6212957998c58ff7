"""All faults of the worker, one after the other, while a decode server is under load.

Every request is answered with the tokens of an undisturbed run, nothing leaks, and the counters show the fault.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from harness import SCOUT, Holdings, PDCluster, random_prompts, wait_until
from load import Load
from worker_faults import FAULTS, Victim

# No recall and room for everything: a request's residency depends only on its own history, so its tokens are
# deterministic, and the worker has work in every step.
CONFIG = {"recall": "off", "resident_tokens": 32768, "verify": True}
GRAPH = {"transport": "graph"}
CASES = {"eager": {}, "recorded": GRAPH}
# The most different ones; the others run with the slow tests.
QUICK = {"killed", "stopped", "page ids damaged"}
CLIENTS = 8
EXACT = 1e-5  # of a layer's output, fp32


class Bench:
    """A cluster, the answers of an undisturbed run, and its processes' resources after it."""

    def __init__(self, servers: PDCluster, case: str) -> None:
        self.servers, self.case = servers, case
        self.prompts = random_prompts([500 + 70 * i for i in range(CLIENTS)], seed=31)
        self.rest()
        # Kernels run in Triton's interpreter: a captured step takes most of a second.
        new_tokens = 16 if case == "recorded" else 60
        self.known = servers.generate(self.prompts, max_new_tokens=new_tokens)
        with self.load():
            time.sleep(3)  # caches, thread pools and allocators reach their size
        self.rest()
        self.before = Holdings.of(servers)
        self.victim = Victim(servers)

    def load(self) -> Load:
        return Load(self.servers, CLIENTS, prompts=self.prompts, known=self.known)

    def rest(self) -> None:
        """Wait until no page is in use."""
        wait_until("all pages are free", lambda: not self.state()["host_pages_used"], 60)

    def assert_nothing_left(self) -> None:
        self.rest()
        self.victim.pid()  # a worker serves
        assert not Holdings.of(self.servers).beyond(self.before)

    def state(self) -> dict:
        return self.servers.kv_offload()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[pytest.mark.slow] if case != "eager" else []) for case in CASES
    ],
)
def bench(request, tiny_model, tmp_path_factory):
    case = request.param
    config = json.dumps(CONFIG | CASES[case])
    with PDCluster(
        tiny_model("qwen3"),
        server_args=SCOUT,
        decode_args=["--kv-offload-config", config],
        max_running_requests=16,
        max_total_tokens=49152,
        env={"TRITON_INTERPRET": "1"} if "recorded" in case else {},
        log_dir=tmp_path_factory.mktemp("servers"),
    ) as servers:
        bench = Bench(servers, case)
        with bench.victim:
            yield bench


def counters(state: dict) -> dict:
    return state["worker"] | {"fallback_pages": state["fallback_pages"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_no_fault_costs_a_request_or_a_token(bench, name):
    fault, victim = FAULTS[name], bench.victim
    if fault.not_in_graphs and "recorded" in bench.case:
        pytest.skip(
            "where steps are recorded nobody computes it again: the server ends, or NaN is merged"
        )
    pid = victim.pid()
    before = counters(bench.state())
    with bench.load() as load:
        steps = bench.state()["steps"]
        wait_until("decoding", lambda: bench.state()["steps"] > steps + 10, 60)
        fault.strike(victim)
        if fault.cause:
            victim.await_next(pid)
        wait_until("answers afterwards", load.all_asked_again(), 60)
    assert not load.lost and not load.wrong, (load.lost, load.wrong)
    after = counters(bench.state())
    print(f"{name}: {load.answered} answers, longest stall {load.longest_stall_s:.1f} s", end=" ")
    print({key: (before[key], after[key]) for key in before if before[key] != after[key]})
    assert bench.state()["verify_max_rel_error"] <= EXACT
    for field in fault.grows:
        assert after[field] > before[field], (field, before, after)
    if fault.cause is not None:
        assert (after["restarts"] > before["restarts"]) == bool(fault.cause), after
        assert fault.cause in after["last_error"]
    bench.assert_nothing_left()


@pytest.mark.slow
def test_deaths_in_a_row(bench):
    """One every two seconds for a minute, if there is a worker to kill."""
    end = time.monotonic() + 60
    before = bench.state()["worker"]["restarts"]
    deaths = 0
    with bench.load() as load:
        while time.monotonic() < end:
            os.kill(bench.victim.pid(), signal.SIGKILL)
            deaths += 1
            time.sleep(2)
    assert not load.lost and not load.wrong, (load.lost, load.wrong)
    bench.assert_nothing_left()
    print(f"{deaths} deaths, {load.answered} answers, longest stall {load.longest_stall_s:.1f} s")
    assert bench.state()["worker"]["restarts"] == before + deaths


@pytest.mark.slow
def test_a_damaged_record_ends_a_server_whose_steps_are_recorded(bench):
    """Before a wrong token is returned: waiting clients get an error that says what to do."""
    if "recorded" not in bench.case:
        pytest.skip("here the server computes what the worker refuses")
    server = bench.servers.servers["decode"]
    with bench.load() as load:
        steps = bench.state()["steps"]
        wait_until("decoding", lambda: bench.state()["steps"] > steps + 10, 60)
        FAULTS["page ids damaged"].strike(bench.victim)
        wait_until("the server's end", lambda: server.exit_code is not None, 120)
    assert load.lost and not load.wrong, load.wrong
    assert "CPU attention refused a record" in server.log()
