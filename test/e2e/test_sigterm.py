"""SIGTERM under load: running requests finish, waiting ones get an error, all processes exit within 20 s."""

import json
import signal
import time
from functools import partial

import pytest

from harness import SCOUT, STEADY, PDCluster, random_prompts, scheduler_pid, wait_until
from in_flight import InFlight, ask, assert_right, watch
from servers.pd_cluster import flags
from servers.sglang_http import http_json

pytestmark = pytest.mark.slow  # some minutes

SENTENCE = "The server is shutting down"
GONE_S = 20
ENDLESS = 6000  # new tokens; more than fit in the drain time


@pytest.fixture(scope="module")
def servers(tiny_model, tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace") / "steps.json"
    config = json.dumps({**STEADY, "trace": str(trace), "trace_steps": 100000})
    with PDCluster(
        tiny_model("qwen3"),
        server_args=SCOUT + flags(kv_offload_config=config),
        prefill_args=flags(chunked_prefill_size=512),
        max_running_requests=12,
        max_total_tokens=20480,
        # Not through a router, which would retry refused requests, and change the message.
        router=False,
        env={
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
            "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
        },
    ) as running:
        running.trace = trace
        yield running


def send_to(servers):
    return lambda payload: servers.ask_pair(payload)


def terminate(servers, name):
    """SIGTERM, a late request, and the exit. Returns the time to exit, and the late request's outcome."""
    server = servers.servers[name]
    watch(servers.server_url(name))
    server.signal(signal.SIGTERM)
    begin = time.monotonic()
    time.sleep(0.3)
    late = ask(partial(http_json, servers.server_url(name) + "/generate"), [5, 6, 7], 4)
    assert server.wait(60), "the server does not end"
    return time.monotonic() - begin, late


def test_a_decode_server_ends_what_runs_and_refuses_what_waits(servers):
    run = random_prompts([900] * 8 + [1000], seed=41)
    wait = random_prompts([6000] * 4, seed=43)  # room for at most one of them
    counts = [60] * 8 + [20] + [40] * 4
    expected = InFlight(send_to(servers), run + wait, counts).outcomes(120)
    assert all(outcome.answer for outcome in expected), expected
    expected = [outcome.answer for outcome in expected]

    worker = servers.kv_offload()["worker"]["pid"]
    scheduler = scheduler_pid(servers)
    wait_until("none has room", lambda: servers.kv_offload()["host_pages_used"] == 0, 60)
    running = InFlight(send_to(servers), run, [60] * 8 + [ENDLESS])
    pages = sum(len(prompt) // 32 for prompt in run)
    wait_until("all have room", lambda: servers.kv_offload()["host_pages_used"] > pages, 60)
    waiting = InFlight(send_to(servers), wait, [40] * 4)
    time.sleep(2)  # they have arrived, and wait
    lasted_s, late = terminate(servers, "decode")
    ran, waited = running.outcomes(GONE_S), waiting.outcomes(GONE_S)

    assert lasted_s <= GONE_S
    assert late.answer is None and "status 503" in late.error and SENTENCE in late.error
    assert_right(ran[:8] + waited, expected[:8] + expected[9:])
    assert all(outcome.answer for outcome in ran[:8]), ran
    assert ran[8].answer is None
    refused = [outcome for outcome in (ran[8], *waited) if outcome.answer is None]
    assert len(refused) >= 3, waited
    assert all("status 503" in r.error and SENTENCE in r.error for r in refused), refused
    assert not {worker, scheduler} & servers.processes().keys()

    trace = json.loads(servers.trace.read_text())
    ids = {event["args"]["step"] for event in trace if event["ph"] == "X"}
    assert ids == set(range(min(ids), max(ids) + 1))


@pytest.mark.slow
def test_a_prefill_server_ends_what_runs_and_refuses_what_waits(servers):
    if servers.servers["decode"].exit_code is not None:
        servers.restart("decode")
    prompts = random_prompts([4000] * 10, seed=42)
    expected = InFlight(send_to(servers), prompts, [12] * 10).outcomes(200)
    assert all(outcome.answer for outcome in expected), expected
    expected = [outcome.answer for outcome in expected]

    load = InFlight(send_to(servers), prompts, [12] * 10)
    wait_until("the first has ended", lambda: load.ended() >= 1, 60)
    lasted_s, late = terminate(servers, "prefill")
    outcomes = load.outcomes(GONE_S)

    assert lasted_s <= GONE_S
    assert late.answer is None and "status 503" in late.error and SENTENCE in late.error
    assert_right(outcomes, expected)
    assert any(outcome.answer is None for outcome in outcomes), "none waited"
    wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 30)
    assert servers.stop() == {}
