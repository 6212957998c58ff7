"""Odd values in the fields of SGLang's requests: each request gets an answer or a 4xx, from both servers of a pair
alike, and the same processes serve the next one with the same tokens."""

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from harness import PDCluster, random_prompts, scheduler_pid, wait_until
from request_fields import Case, sampled_cases, send, single_cases
from servers.pd_cluster import HOST, flags
from servers.server_process import ServerFailed
from servers.sglang_http import RequestFailed

# Tokens depend on a request alone, as in conftest.py.
CONFIG = {"recall": "fixed", "recall_interval": 1, "resident_tokens": 49152}
GIVE_UP_S = 4
IN_FLIGHT = 12  # of max_running_requests=16
MAX_FAULTS = 20  # then the message is long enough
PROMPTS = random_prompts([300], seed=3)


@pytest.fixture
def silent_port():
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen(512)
        yield silent.getsockname()[1]


def tokens(servers: PDCluster) -> tuple[int, ...]:
    return servers.generate(PROMPTS, max_new_tokens=8)[0].output_ids


def schedulers(servers: PDCluster) -> dict[str, int]:
    for server in servers.servers.values():
        server.check()
    return {name: scheduler_pid(servers, name) for name in servers.servers}


def harm(servers: PDCluster, pids: dict[str, int], expected: tuple[int, ...]) -> str:
    """What is wrong with the servers, if anything."""
    try:
        schedulers(servers)  # before a request that nobody would answer
        if (got := tokens(servers)) != expected:
            return f"the next request gets {got}, not {expected}"
        if (now := schedulers(servers)) != pids:
            return f"other processes: {now}, were {pids}"
    except (ServerFailed, RequestFailed, OSError) as error:
        return f"{type(error).__name__}: {str(error)[-1500:]}"
    return ""


def wrong_answer(case: Case, statuses: dict[str, int | str]) -> str:
    """Where the halves meet may be a place where nobody answers, or in use: only the servers are judged then. So is
    what SGLang's parser of OpenAI's requests, before any code of ours, answers with 500."""
    place = [value for name, value in case.odd.items() if name.startswith("bootstrap")]
    if "response_format" in case.odd:
        return ""
    if place and not any(isinstance(value, list | dict) for value in place):
        return ""
    right = all(isinstance(one, int) and one < 500 for one in statuses.values())
    alike = len({one // 100 for one in statuses.values() if isinstance(one, int)}) < 2
    return "" if right and alike else f"answers {statuses}"


def send_all(servers: PDCluster, cases: list[Case]) -> None:
    """Several at once; those of a group after which something is wrong again, one by one."""
    pids, expected, faults = schedulers(servers), tokens(servers), []
    for at in range(0, len(cases), IN_FLIGHT):
        group = cases[at : at + IN_FLIGHT]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = list(pool.map(partial(send, servers, give_up_s=GIVE_UP_S), group))
        hurt = harm(servers, pids, expected)
        suspects = [
            case for case, answer in zip(group, answers, strict=True) if wrong_answer(case, answer)
        ]
        named = False
        for case in group if hurt else suspects:
            for name, server in servers.servers.items():
                if server.exit_code is not None:
                    servers.restart(name)
                    pids = schedulers(servers)
            wrong = wrong_answer(case, send(servers, case, GIVE_UP_S))
            after = harm(servers, pids, expected)
            if wrong or after:
                replay = json.dumps(case.body(servers.bootstrap_port))
                faults.append(f"{case}\n  {wrong}\n  {after}\n  POST {case.path} {replay[:500]}")
            if after:
                named = True
                break
        if hurt and not named:
            faults.append(f"one of {list(map(str, group))}\n  {hurt}")
        if hurt or len(faults) >= MAX_FAULTS:
            break
    assert not faults, "\n".join(faults)
    wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 30)


def test_a_sample_of_requests_with_odd_fields(servers, silent_port):
    send_all(servers, sampled_cases(60, seed=1, silent_port=silent_port))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_requests_with_odd_fields(tiny_model, silent_port):
    with PDCluster(
        tiny_model("qwen3"),
        server_args=flags(
            kv_offload="scout", kv_offload_budget=128, kv_offload_config=json.dumps(CONFIG)
        ),
        max_running_requests=16,
        max_total_tokens=49152,
        # Halves without the other are ended while the test runs.
        env={
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "10",
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10",
        },
    ) as servers:
        single = list(single_cases(silent_port))
        send_all(servers, random.Random(0).sample(single, 3000))
        send_all(servers, sampled_cases(2000, seed=2, silent_port=silent_port))
