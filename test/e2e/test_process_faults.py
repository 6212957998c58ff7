"""Loss of clients, servers and the router under load, and exhausted resources: every request ends with the right tokens
or an error, and a replacement serves again."""

import http.client
import json
import os
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from harness import (
    SCOUT,
    STEADY,
    PDCluster,
    ProcessUsage,
    assert_same_tokens,
    random_prompts,
    scheduler_pid,
    wait_until,
)
from in_flight import InFlight, ask, assert_right
from servers.pd_cluster import flags
from servers.sglang_http import generate_payload, http_json

pytestmark = pytest.mark.slow  # some minutes

# Every layer selects by the real query, so that a retraction changes no token; nor does the order of sums, as long as
# residency does not depend on other requests.
CONFIG = flags(kv_offload_config=json.dumps({**STEADY, "exact_layers": [0, 1, 2, 3]}))
NEW_TOKENS = 80
LONG = 400
OUTAGE_S = 60
"""Timeout for a request to end after a server is gone: heartbeats detect it in about 10 s."""
SERVED_AGAIN_S = 60


@pytest.fixture(scope="module")
def servers(tiny_model):
    with PDCluster(
        tiny_model("qwen3"),
        server_args=SCOUT + CONFIG,
        prefill_args=flags(chunked_prefill_size=1024),
        max_running_requests=12,
        max_total_tokens=24576,
        router_args=flags(
            cb_timeout_duration_secs=5, health_failure_threshold=20, disable_retries=True
        ),
        env={
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
            "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "4",
        },
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(servers):
    """Prompts, half of which do not fit in the pool at once, and their answers."""
    prompts = random_prompts([1500, 1300, 1100, 900] * 3 + [4000] * 4, seed=51)
    return prompts, servers.generate(prompts, max_new_tokens=NEW_TOKENS)


def in_flight(servers, prompts):
    return InFlight(servers.url, prompts, [NEW_TOKENS] * len(prompts))


def wait_for_steps(servers, count):
    steps = servers.kv_offload()["steps"]
    wait_until("decoding", lambda: servers.kv_offload()["steps"] > steps + count, 60)


def assert_idle(servers):
    wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 60)
    assert servers.kv_offload()["resident_pages"] == 0


def assert_served(servers, undisturbed):
    """Soon one request is served, through the router, and then all."""
    prompts, expected = undisturbed

    def served():
        send = lambda payload: http_json(servers.url + "/generate", payload, timeout_s=20)  # noqa: E731
        return ask(send, prompts[3], 8).answer is not None

    wait_until("a request is served", served, SERVED_AGAIN_S)
    assert_same_tokens(expected, servers.generate(prompts, max_new_tokens=NEW_TOKENS))
    assert_idle(servers)


def begin_stream(servers, prompt):
    """Request a long answer. Returns the connection, which the caller closes."""
    parts = urlsplit(servers.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    body = json.dumps(generate_payload(prompt, LONG, stream=True))
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    return connection


def leave(servers, prompt, after_s):
    """Send a request, and close the connection ``after_s`` later, regardless of the answer."""
    connection = begin_stream(servers, prompt)
    time.sleep(after_s)
    connection.close()


def test_clients_that_leave_at_any_time(servers, undisturbed):
    """Before their first token, during prefill or transfer, while they wait for room."""
    prompts, expected = undisturbed
    assert_idle(servers)
    before = {name: ProcessUsage.of(scheduler_pid(servers, name)) for name in servers.servers}
    load = in_flight(servers, prompts)
    leavers = random_prompts([4000, 200, 2500, 900] * 6, seed=52)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: leave(servers, leavers[i], i * 0.08), range(len(leavers))))
    outcomes = load.outcomes(120)
    assert_same_tokens(expected, [outcome.answer for outcome in outcomes])
    assert_idle(servers)
    for name, usage in before.items():
        after = ProcessUsage.of(scheduler_pid(servers, name))
        assert after.open_files <= usage.open_files + 16, (name, usage, after)
        assert after.threads <= usage.threads + 8, (name, usage, after)


def test_clients_that_leave_while_retracted(servers):
    """Those that stay are answered; test_confinement.py compares tokens after a pause."""
    prompts = random_prompts([300, 500] * 4, seed=54)
    log, seen = servers.servers["decode"].log, len(servers.servers["decode"].log())
    load = InFlight(servers.url, prompts[:4], [LONG] * 4)
    left = [begin_stream(servers, prompt) for prompt in prompts[4:]]
    running = f"#running-req: {len(prompts)},"
    wait_until("all decode", lambda: running in log()[seen:], 60)
    http_json(servers.server_url("decode") + "/pause_generation", {"mode": "retract"})
    for connection in left:
        connection.close()
    time.sleep(3)  # SGLang aborts a stream 2 s after its client has disconnected
    http_json(servers.server_url("decode") + "/continue_generation", {})
    for outcome in load.outcomes(120):
        assert outcome.answer and len(outcome.answer.output_ids) == LONG, outcome
    assert_idle(servers)


def test_the_router_is_killed(servers, undisturbed):
    prompts, expected = undisturbed
    load = in_flight(servers, prompts)
    wait_for_steps(servers, 5)
    servers.router.signal(signal.SIGKILL)
    assert_right(load.outcomes(OUTAGE_S), expected)
    assert_idle(servers)
    servers.restart("router")
    assert_served(servers, undisturbed)


def test_a_new_worker_starts_without_the_temporary_folder(servers, undisturbed):
    prompts, expected = undisturbed
    load = in_flight(servers, prompts)
    wait_for_steps(servers, 5)
    shutil.rmtree(servers.scratch_dir)
    before = servers.kv_offload()["worker"]
    os.kill(before["pid"], signal.SIGKILL)
    outcomes = load.outcomes(120)
    os.makedirs(servers.scratch_dir)
    assert_same_tokens(expected, [outcome.answer for outcome in outcomes])
    wait_until("a new worker", lambda: servers.kv_offload()["worker"]["state"] == "ready", 60)
    assert servers.kv_offload()["worker"]["restarts"] > before["restarts"]
    assert_idle(servers)


@contextmanager
def no_descriptor(pid):
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used - 8, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_no_descriptor_is_left_for_a_new_worker(servers, undisturbed):
    prompts, expected = undisturbed
    prompts, expected = prompts[:8], expected[:8]
    load = in_flight(servers, prompts)
    wait_for_steps(servers, 25)  # all have arrived: SGLang's transfer needs descriptors too
    with no_descriptor(scheduler_pid(servers)):
        os.kill(servers.kv_offload()["worker"]["pid"], signal.SIGKILL)
        wait_until(
            "a start fails",
            lambda: (
                "cannot start the CPU attention process"
                in servers.kv_offload()["worker"]["last_error"]
            ),
            30,
        )
        outcomes = load.outcomes(120)
    assert_same_tokens(expected, [outcome.answer for outcome in outcomes])
    wait_until("a new worker", lambda: servers.kv_offload()["worker"]["state"] == "ready", 60)
    assert_served(servers, undisturbed)


def kill_under_load(servers, undisturbed, name):
    prompts, expected = undisturbed
    load = in_flight(servers, prompts)
    wait_for_steps(servers, 3)
    servers.servers[name].signal(signal.SIGKILL)
    outcomes = load.outcomes(OUTAGE_S)
    assert_right(outcomes, expected)
    assert any(outcome.answer is None for outcome in outcomes), "none was hit"


def test_the_prefill_server_is_killed_and_replaced(servers, undisturbed):
    """With requests in prefill, in transfer, and waiting for room on the decode server."""
    kill_under_load(servers, undisturbed, "prefill")
    assert_idle(servers)
    servers.restart("prefill")
    assert_served(servers, undisturbed)


def test_the_decode_server_is_killed_and_replaced(servers, undisturbed):
    """The prefill server continues."""
    prefill = scheduler_pid(servers, "prefill")
    worker = servers.kv_offload()["worker"]["pid"]
    kill_under_load(servers, undisturbed, "decode")
    wait_until("the worker has ended", lambda: worker not in servers.processes(), 30)
    servers.restart("decode")
    assert_served(servers, undisturbed)
    assert scheduler_pid(servers, "prefill") == prefill
    assert servers.stop() == {}


def test_transfers_that_fail_at_random(tiny_model):
    """SGLang fails every poll of a transfer with this probability, on both servers. Answers are compared with each
    other, as no server is undisturbed."""
    with PDCluster(
        tiny_model("qwen3"),
        server_args=SCOUT + CONFIG,
        max_running_requests=12,
        max_total_tokens=24576,
        router_args=flags(disable_circuit_breaker=True),
        env={"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.04"},
    ) as servers:
        # No prompt slightly above the budget: alone it gets full attention, and selection in a batch.
        prompts = random_prompts([700, 300, 100, 900, 500, 400], seed=53)
        send = lambda payload: http_json(servers.url + "/generate", payload, timeout_s=OUTAGE_S)  # noqa: E731
        with ThreadPoolExecutor(12) as pool:
            outcomes = list(pool.map(lambda i: ask(send, prompts[i % 6], 24), range(300)))
        answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
        print(f"{len(answers)} of 300 answered, longest {max(o.after_s for o in outcomes):.1f} s")
        assert 6 < len(answers) < 300
        assert all(outcome.answer or "status 5" in outcome.error for outcome in outcomes)
        for i in range(6):
            tokens = {o.answer.output_ids for o in outcomes[i::6] if o.answer is not None}
            assert len(tokens) <= 1, f"prompt {i}"
        assert_idle(servers)
        scheduler_pid(servers, "prefill")
        assert servers.stop() == {}
