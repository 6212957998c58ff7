"""All faults of the worker, one after the other, while a decode server is under load.

Every request is answered with the tokens of an undisturbed run, nothing leaks, and the counters show the fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time

import pytest

from digest_flips import flip_one_bit_of_each_digest
from harness import Holdings, PDCluster, random_prompts, wait_until
from load import Load
from servers.pd_cluster import flags
from servers.sglang_http import RequestFailed
from worker_faults import FAULTS, Victim

# No recall and room for everything: a request's residency depends only on its own history, so its tokens are
# deterministic, and the worker has work in every step.
CONFIG = {"recall": "off", "resident_tokens": 32768, "verify": True}
GRAPH = {"transport": "graph"}
# A prompt in the radix cache has other resident pages than a new one. Selection and attention with the real query do
# not depend on residency.
RADIX = {"precompute": False}
CASES = {"eager": {}, "eager, radix": RADIX, "recorded": GRAPH}
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
        if "radix" in self.case:
            wait_until("no request runs", self._flushed, 60)
        wait_until("all pages are free", lambda: not self.state()["host_pages_used"], 60)

    def _flushed(self) -> bool:
        with contextlib.suppress(RequestFailed):
            self.servers.flush()
            return True
        return False

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
    radix = ["--disaggregation-decode-enable-radix-cache"] if "radix" in case else []
    with PDCluster(
        tiny_model("qwen3"),
        server_args=flags(kv_offload="scout", kv_offload_budget=128),
        decode_args=["--kv-offload-config", config, *radix],
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
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seconds", [60, 300])
def test_deaths_in_a_row(bench, seconds):
    """One every two seconds, if there is a worker to kill."""
    end = time.monotonic() + seconds
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
def test_digests_with_flipped_bits_choose_other_pages_and_nothing_else(bench):
    """Tokens may differ then, but attention to the selected pages is exact."""
    before = bench.state()
    with bench.load() as load:
        # At first nearly all pages are allocated, and few written: their K is an earlier request's, whose digests are
        # gone.
        wait_until("an answer of each prompt", load.all_asked_again(), 60)
        flipped = flip_one_bit_of_each_digest(bench.victim, random.Random(5))
        enough = load.answered + CLIENTS
        wait_until("answers afterwards", lambda: load.answered >= enough, 60)
    after = bench.state()
    print(f"{flipped} bits, {load.answered} answers, {len(load.wrong)} others")
    assert not load.lost and load.wrong
    assert after["verify_checks"] > before["verify_checks"]
    assert after["verify_max_rel_error"] <= EXACT
    assert counters(after)["restarts"] == counters(before)["restarts"]
    assert after["fallback_pages"] == before["fallback_pages"]
    bench.assert_nothing_left()
    # Every page gets a new digest when it is reallocated.
    with bench.load() as load:
        wait_until("answers", load.all_asked_again(), 60)
    assert not load.lost and not load.wrong, (load.lost, load.wrong)


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
