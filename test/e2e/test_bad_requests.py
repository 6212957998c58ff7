"""Invalid, odd, huge or excessive requests to both servers and the router: each gets an answer or a 4xx, from both
servers of a pair alike, and the same processes serve the next one with the same tokens."""

import contextlib
import itertools
import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import odd_requests as odd
from harness import random_prompts, scheduler_pid, wait_idle
from odd_requests import ANSWER_S, BOTH, IDS, SAMPLING, Case, send
from servers.group import HOST
from servers.pd_cluster import PDCluster
from servers.sglang_http import JSON, exchange, http_json, sse_events

GIVE_UP_S = 4  # of a client with an odd request
IN_FLIGHT = 12  # of max_running_requests=16
CONTEXT = 32768  # of the tiny model
NEXT = random_prompts([300], seed=3)
# Invalid: a status of 400 or more is expected. More, without servers: test/plugin/test_http.py.
REFUSED: dict[str, tuple[Any, ...]] = {
    "input_ids": (["a", "b"], [1, [2]], 5, [2**70], [[1, 2], [-3]], [], [5] * CONTEXT),
    "text": ("", 5),
    "sampling_params": ("x",),
    "sampling_params.max_new_tokens": (-5, 10**12),
    "sampling_params.temperature": (-1, math.nan),
    "sampling_params.stop_token_ids": (["a"],),
    "sampling_params.logit_bias": ({"999999": 5.0}, {"5": 1e308}),
    "sampling_params.n": (3,),
    "sampling_params.regex": ("(((", "\0"),
    "sampling_params.json_schema": ("{bad",),
    "sampling_params.foo": (1,),
    "return_hidden_states": (True,),
    "bootstrap_host": ([HOST], None),
}
NO_JSON = (b'{"input_ids": [5', b"", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b"{}")
OTHER_TYPES = ("text/plain", "application/x-www-form-urlencoded", "")
# Has an answer, if a short one.
ANSWERED: dict[str, tuple[Any, ...]] = {
    "sampling_params.regex": ("[0-9]{4}abc",),
    "sampling_params.max_new_tokens": (0,),
    "sampling_params.temperature": (1e-300, 1e30),
    "sampling_params.stop_token_ids": ([10**12, -4],),
}


@pytest.fixture
def silent_port():
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen(512)
        yield silent.getsockname()[1]


def tokens(servers: PDCluster) -> tuple[int, ...]:
    return servers.generate(NEXT, max_new_tokens=8)[0].output_ids


def schedulers(servers: PDCluster) -> dict[str, int]:
    return {name: scheduler_pid(servers, name) for name in servers.servers}


@pytest.fixture
def served_after(servers):
    """Fails if the processes or the answer to the next request differ from before."""
    before = schedulers(servers), tokens(servers)
    yield
    assert (schedulers(servers), tokens(servers)) == before
    wait_idle(servers)


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 1), pytest.param(2000, 2, marks=pytest.mark.slow)]
)
def test_requests_with_odd_fields(servers, served_after, silent_port, count, seed):
    cases = odd.sampled_cases(count, seed, silent_port)
    pids, expected = schedulers(servers), tokens(servers)
    for at in range(0, len(cases), IN_FLIGHT):
        group = cases[at : at + IN_FLIGHT]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = list(pool.map(lambda case: send(servers, case, GIVE_UP_S), group))
        # On a busy machine one may be late: it is asked again, alone.
        wrong = [case for case, a in zip(group, answers, strict=True) if odd.wrong_answer(case, a)]
        again = [odd.wrong_answer(case, send(servers, case, GIVE_UP_S)) for case in wrong]
        assert not any(again), dict(zip(map(str, wrong), again, strict=True))
        now = schedulers(servers), tokens(servers)
        assert now == (pids, expected), list(map(str, group))


def both(servers, **fields):
    """The statuses of both servers for a request, by the names of its odd fields."""
    return list(send(servers, Case("/generate", fields)).values())


def sampling(**values):
    return {"input_ids": IDS, "sampling_params": SAMPLING | values}


def test_what_makes_no_sense_is_refused(servers, served_after):
    """And what is only odd is answered."""
    for field, values in ANSWERED.items():
        for value in values:
            assert both(servers, **{field: value}) == [200, 200], (field, value)
    for field, values in REFUSED.items():
        for value in values:
            statuses = both(servers, **{field: value})
            assert all(400 <= status < 600 for status in statuses), (field, value, statuses)
            # SGLang's router drops unknown fields, so there may be an answer.
            found = send(servers, Case("/generate", {field: value}, ("router",)))["router"]
            assert 200 <= found < 600, (field, value)
    wrong = [(data, JSON) for data in NO_JSON]
    wrong += [(json.dumps(sampling()).encode(), name) for name in OTHER_TYPES]
    for (data, content_type), name in itertools.product(wrong, (*BOTH, "router")):
        url = servers.server_url(name) + "/generate"
        status, _ = exchange(url, data, content_type=content_type, timeout_s=ANSWER_S)
        assert 400 <= status < 600, (name, data, content_type)


def test_what_only_one_server_refuses_ends_both_halves(servers, served_after):
    """The decode server's pool is smaller; the prefill server waits for a half that fails, without a limit here."""
    too_long = [5] * (CONTEXT - 100)
    assert both(servers, input_ids=too_long) == [400, 400]
    data = json.dumps({"input_ids": too_long, "sampling_params": SAMPLING}).encode()
    status, message = exchange(servers.url + "/generate", data, timeout_s=ANSWER_S)
    assert (status, b"--num-reserved-decode-tokens" in message) == (400, True)


def stream(servers, rid, max_new_tokens):
    data = sampling(max_new_tokens=max_new_tokens, ignore_eos=True) | {"rid": rid, "stream": True}
    return contextlib.closing(sse_events(servers.url + "/generate", data))


def end_of(events):
    *_, last = events
    return last["meta_info"]["finish_reason"]


def test_aborting_one_id_leaves_those_that_begin_with_it(servers, served_after):
    with stream(servers, "job-12", 300) as longer:
        next(longer)
        with stream(servers, "\0", 300) as left:
            next(left)
        with stream(servers, "job-1", 20000) as aborted:
            next(aborted)
            http_json(servers.server_url("decode") + "/abort_request", {"rid": "job-1"})
            assert end_of(aborted)["type"] == "abort"
        assert end_of(longer) == {"type": "length", "length": 300}


def test_a_prefill_server_that_is_silent_delays_nobody(servers, served_after):
    with socket.create_server((HOST, 0)) as silent, ThreadPoolExecutor(1) as pool:
        place = odd.meeting(silent.getsockname()[1], {})
        decode, data = servers.server_url("decode"), json.dumps(sampling() | place).encode()
        with stream(servers, "other", 2000) as events:
            next(events)
            pool.submit(exchange, decode + "/generate", data, timeout_s=1)
            asked = [silent.accept()[0] for _ in range(2)]  # by the HTTP process and the scheduler
            for _ in range(50):
                next(events)
            for connection in asked:  # neither has given up yet
                connection.setblocking(False)
                assert connection.recv(4096)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
                connection.close()


@pytest.mark.slow
def test_a_body_of_100_megabytes_is_refused(servers, served_after):
    data = json.dumps({"input_ids": [5] * 34_000_000}).encode()
    assert len(data) > 10**8
    for url in (*map(servers.server_url, BOTH), servers.url):
        assert 400 <= exchange(url + "/generate", data, timeout_s=60)[0] < 500, url


@pytest.mark.slow
def test_2000_clients_at_once(servers, served_after):
    url, data = servers.url + "/generate", json.dumps(sampling(max_new_tokens=2)).encode()
    with ThreadPoolExecutor(2000) as pool:
        statuses = list(pool.map(lambda _: odd.status_of(url, data, 500), range(2000)))
    assert all(isinstance(status, int) for status in statuses)
    assert statuses.count(200) >= 1000, {status: statuses.count(status) for status in statuses}
