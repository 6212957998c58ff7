"""Faults of the worker while a decode server is under load: all, one after the other, and random ones.

Every request is answered with the tokens of an undisturbed run, nothing leaks, and the counters show the fault.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter

import pytest

from clients import Load
from harness import (
    SCOUT,
    Holdings,
    PDCluster,
    random_prompts,
    wait_for_steps,
    wait_idle,
    wait_until,
)
from servers.group import flags
from worker_faults import FAULTS, Victim

# As in conftest.py, with steps recorded as on a GPU.
RECORDED = {"recall": "off", "resident_tokens": 32768, "verify": True, "transport": "graph"}
# The most different ones; the others run with the slow tests.
QUICK = {"killed", "stopped", "page ids damaged"}
CLIENTS = 8
EXACT = 1e-5  # of a layer's output, fp32
SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "1"))
SOAK_SEED = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1 << 30)))


class Bench:
    """A cluster, the answers of an undisturbed run, and its processes' resources after it."""

    def __init__(self, servers: PDCluster, is_recorded: bool) -> None:
        self.servers, self.is_recorded = servers, is_recorded
        prompts = random_prompts([500 + 70 * i for i in range(CLIENTS)], seed=31)
        wait_idle(servers)
        # Kernels run in Triton's interpreter: a captured step takes most of a second.
        answers = servers.generate(prompts, max_new_tokens=16 if is_recorded else 60)
        self.known = list(zip(prompts, answers, strict=True))
        with self.load():
            time.sleep(3)  # caches, thread pools and allocators reach their size
        wait_idle(servers)
        self.before = Holdings.of(servers)
        self.victim = Victim(servers)

    def load(self, **more) -> Load:
        return Load(self.servers, CLIENTS, self.known, **more)

    def assert_nothing_left(self, **more) -> None:
        wait_idle(self.servers)
        self.victim.pid()  # a worker serves
        assert not Holdings.of(self.servers).beyond(self.before, **more)

    def state(self) -> dict:
        return self.servers.kv_offload()


@pytest.fixture(scope="module", params=["eager", pytest.param("recorded", marks=pytest.mark.slow)])
def bench(request, tiny_model):
    if request.param == "eager":
        bench = Bench(request.getfixturevalue("servers"), is_recorded=False)
        with bench.victim:
            yield bench
        return
    with PDCluster(
        tiny_model("qwen3"),
        {"decode": flags(kv_offload_config=json.dumps(RECORDED))},
        server_args=SCOUT + flags(max_running_requests=16, max_total_tokens=49152),
        env={"TRITON_INTERPRET": "1"},
    ) as servers:
        bench = Bench(servers, is_recorded=True)
        with bench.victim:
            yield bench


def counters(state: dict) -> dict:
    return state["worker"] | {"fallback_pages": state["fallback_pages"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_no_fault_costs_a_request_or_a_token(bench, name):
    fault, victim = FAULTS[name], bench.victim
    if fault.not_in_graphs and bench.is_recorded:
        pytest.skip("nobody computes it again: the server ends, or NaN is merged")
    pid = victim.pid()
    before = counters(bench.state())
    with bench.load() as load:
        wait_for_steps(bench.servers, 10)
        fault.strike(victim)
        if fault.cause:
            victim.await_next(pid)
        wait_until("answers afterwards", load.more_answered(), 60)
    assert not load.lost and not load.wrong, (load.lost, load.wrong)
    after = counters(bench.state())
    assert bench.state()["verify_max_rel_error"] <= EXACT
    for field in fault.grows:
        assert after[field] > before[field], (field, before, after)
    if fault.cause is not None:
        assert (after["restarts"] > before["restarts"]) == bool(fault.cause), after
        assert fault.cause in after["last_error"]
    bench.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(60 * SOAK_MINUTES + 600)
def test_random_faults_under_random_load(bench):
    """SOAK_MINUTES and SOAK_SEED in the environment ask for more, or for the same again."""
    chance, struck = random.Random(SOAK_SEED), Counter[str]()
    end = time.monotonic() + 60 * SOAK_MINUTES
    names = [name for name, f in FAULTS.items() if not (bench.is_recorded and f.not_in_graphs)]
    before = bench.state()["worker"]["restarts"]
    with bench.load(random_share=0.6, seed=SOAK_SEED) as load:
        while time.monotonic() < end and not (load.lost or load.wrong):
            time.sleep(chance.uniform(2, 10))
            name = chance.choice(names)
            try:
                FAULTS[name].strike(bench.victim)
                struck[name] += 1
            except OSError:  # it ended meanwhile, from the last fault
                pass
    print(f"seed {SOAK_SEED}: {load.answered} answers, {dict(struck)}")
    assert not load.lost and not load.wrong, (load.lost, load.wrong)
    assert load.answered and bench.state()["worker"]["restarts"] > before
    assert bench.state()["verify_max_rel_error"] <= EXACT
    bench.assert_nothing_left(open_files=16)


@pytest.mark.slow
def test_a_damaged_record_ends_a_server_whose_steps_are_recorded(bench):
    """Before a wrong token is returned: waiting clients get an error that says what to do."""
    if not bench.is_recorded:
        pytest.skip("here the server computes what the worker refuses")
    server = bench.servers.servers["decode"]
    with bench.load() as load:
        wait_for_steps(bench.servers, 10)
        FAULTS["page ids damaged"].strike(bench.victim)
        wait_until("the server's end", lambda: server.exit_code is not None, 120)
    assert load.lost and not load.wrong, load.wrong
    assert "CPU attention refused a record" in server.log()
