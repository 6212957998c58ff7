"""Invalid, huge or excessive input to both servers and the router: each gets an HTTP error or an answer, and the same
processes serve the next request."""

import asyncio
import contextlib
import http.client
import json
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from harness import assert_same_tokens, random_prompts, scheduler_pid, wait_until
from servers.pd_cluster import HOST
from servers.sglang_http import sse_events

JSON = "application/json"
ANSWER_S = 20
"""Timeout of one request, on a busy machine."""
CONTEXT = 32768  # of the tiny model
IDS = [5, 6, 7, 8]


def body(sampling=None, **fields):
    sampling = {"temperature": 0, "max_new_tokens": 4, **(sampling or {})}
    return {"sampling_params": sampling, **fields}


def sampling(**values):
    return body(values, input_ids=IDS)


# Invalid: a status of 400 or more is expected.
REFUSED = {
    "ids: strings": body(input_ids=["a", "b"]),
    "ids: floats": body(input_ids=[1.5, 2.5]),
    "ids: a float among them": body(input_ids=[1, 2.5]),
    "ids: null among them": body(input_ids=[1, None]),
    "ids: a list among them": body(input_ids=[1, [2]]),
    "ids: lists of lists": body(input_ids=[[[1]]]),
    "ids: a number": body(input_ids=5),
    "ids: an object": body(input_ids={"a": 1}),
    "ids: larger than 64 bits": body(input_ids=[2**70]),
    "ids: outside the vocabulary": body(input_ids=[10**6]),
    "ids: negative in a batch": body(input_ids=[[1, 2], [-3]]),
    "ids: none": body(input_ids=[]),
    "ids: none in a batch": body(input_ids=[[]]),
    "ids: past the context": body(input_ids=[5] * CONTEXT),
    "text: none": body(text=""),
    "text: a number": body(text=5),
    "no prompt": {},
    "max_new_tokens: negative": sampling(max_new_tokens=-5),
    "max_new_tokens: past the context": sampling(max_new_tokens=10**12),
    "max_new_tokens: a string": sampling(max_new_tokens="4"),
    "max_new_tokens: a fraction": sampling(max_new_tokens=2.5),
    "temperature: negative": sampling(temperature=-1),
    "temperature: infinite": sampling(temperature=float("inf")),
    "temperature: not a number": sampling(temperature=float("nan")),
    "temperature: a string": sampling(temperature="hot"),
    "top_p: 2": sampling(top_p=2),
    "top_k: 2 to the 40": sampling(top_k=2**40, temperature=1),
    "top_k: a string": sampling(top_k="a"),
    "min_p: 9": sampling(min_p=9),
    "frequency_penalty: 99": sampling(frequency_penalty=99),
    "repetition_penalty: 0": sampling(repetition_penalty=0),
    "stop: a number": sampling(stop=5),
    "stop_token_ids: strings": sampling(stop_token_ids=["a"]),
    "stop_token_ids: outside the vocabulary, with min_new_tokens": sampling(
        stop_token_ids=[513], min_new_tokens=3
    ),
    "min_new_tokens: more than max_new_tokens": sampling(min_new_tokens=100),
    "logit_bias: outside the vocabulary": sampling(logit_bias={"999999": 5.0}),
    "logit_bias: larger than 32 bits": sampling(logit_bias={"5": 1e308}),
    "sampling_seed: larger than 64 bits": sampling(sampling_seed=2**80, temperature=1),
    "n: 3": sampling(n=3),
    "n: a billion": sampling(n=10**9),
    "session_params: of no session": body(input_ids=IDS, session_params={"id": "none"}),
    "top_logprobs_num: 129": body(input_ids=IDS, return_logprob=True, top_logprobs_num=129),
    "logprob_start_len: -5": body(input_ids=IDS, return_logprob=True, logprob_start_len=-5),
    "logprob_start_len: a list": body(input_ids=IDS, logprob_start_len=[0]),
    "bootstrap_room: a list": body(input_ids=IDS, bootstrap_room=[5]),
    "bootstrap_host: a list": body(input_ids=IDS, bootstrap_host=[HOST]),
    "bootstrap_host: null": body(input_ids=IDS, bootstrap_host=None),
    "rid: half a surrogate pair": body(input_ids=IDS, rid="\ud800"),
    "regex: broken": sampling(regex="((("),
    "json_schema: broken": sampling(json_schema="{bad"),
    "sampling_params: an unknown one": sampling(foo=1),
    "sampling_params: a string": {"input_ids": IDS, "sampling_params": "x"},
    "JSON: broken": b'{"input_ids": [5',
    "JSON: nothing": b"",
    "JSON: a list": b"[]",
    "JSON: not UTF-8": b"\xff\xfe\x00",
    "JSON: deeply nested": b"[" * 100000,
}
# Has an answer, if a short one.
ANSWERED = {
    "regex": sampling(regex="[0-9]{4}abc"),
    "max_new_tokens: 0": sampling(max_new_tokens=0),
    "temperature: tiny": sampling(temperature=1e-300),
    "temperature: huge": sampling(temperature=1e30),
    "stop_token_ids: outside the vocabulary": sampling(stop_token_ids=[10**12, -4]),
}


@pytest.fixture(scope="module")
def before(servers):
    """The processes, and a prompt with its answer."""
    processes = {name: scheduler_pid(servers, name) for name in servers.servers}
    prompts = random_prompts([300])
    return processes, prompts, servers.generate(prompts, max_new_tokens=8)


@pytest.fixture
def served_after(servers, before):
    """Fails if the processes or the answer to the next request differ from the start."""
    processes, prompts, expected = before
    yield
    assert_same_tokens(expected, servers.generate(prompts, max_new_tokens=8))
    assert {name: scheduler_pid(servers, name) for name in servers.servers} == processes
    wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 10)


def post(url, data, content_type=JSON, timeout_s=ANSWER_S):
    """Status and the beginning of the answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("POST", "/generate", data, {"Content-Type": content_type})
        response = connection.getresponse()
        return response.status, response.read()[:300]
    finally:
        connection.close()


def post_to_pair(servers, data):
    """The same request to both servers, as the router would. Returns both statuses."""

    def one(name):
        return post(servers.server_url(name), meeting)[0]

    meeting = data
    if isinstance(data, dict):
        many = isinstance(data.get("input_ids"), list) and any(
            isinstance(ids, list) for ids in data["input_ids"]
        )
        of_one = {
            "bootstrap_host": HOST,
            "bootstrap_port": servers.bootstrap_port,
            "bootstrap_room": uuid.uuid4().int >> 65,
        }
        meeting = json.dumps({k: [v] * 2 if many else v for k, v in of_one.items()} | data)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, ("prefill", "decode")))


def encoded(data):
    return data if isinstance(data, bytes) else json.dumps(data)


def test_what_makes_no_sense_is_refused(servers, served_after):
    for case, data in REFUSED.items():
        statuses = post_to_pair(servers, data)
        assert all(400 <= status < 600 for status in statuses), (case, statuses)
        # SGLang's router drops unknown fields, so there may be an answer.
        assert 200 <= post(servers.url, encoded(data))[0] < 600, case


def test_what_is_odd_is_answered(servers, served_after):
    for case, data in ANSWERED.items():
        assert post_to_pair(servers, data) == [200, 200], case


def test_what_only_one_server_refuses_ends_both_halves(servers, served_after):
    """The decode server's pool is smaller; the prefill server waits for a half that fails, without a limit here."""
    too_long = body(input_ids=[5] * (CONTEXT - 100))
    assert post_to_pair(servers, too_long) == [400, 400]
    status, message = post(servers.url, json.dumps(too_long))
    assert (status, b"--num-reserved-decode-tokens" in message) == (400, True)


def test_a_room_in_use_is_refused(servers, served_after):
    twice = sampling(max_new_tokens=200, ignore_eos=True) | {"bootstrap_room": 5}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: post_to_pair(servers, twice), range(2)))
    assert [sorted(of_one_server) for of_one_server in zip(*answers, strict=True)] == [
        [200, 400]
    ] * 2


def test_a_room_of_which_something_is_left_is_refused(servers, served_after):
    place = {"bootstrap_host": HOST, "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 7}
    with pytest.raises(
        TimeoutError
    ):  # the prefill server hears of it, and that the client has left
        post(servers.server_url("decode"), json.dumps(sampling() | place), timeout_s=1)
    wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 20)
    assert post_to_pair(servers, sampling() | {"bootstrap_room": 7}) == [503, 503]


def stream(servers, rid, max_new_tokens):
    data = sampling(max_new_tokens=max_new_tokens, ignore_eos=True) | {"rid": rid, "stream": True}
    return contextlib.closing(sse_events(servers.url + "/generate", data))


def test_aborting_one_id_leaves_those_that_begin_with_it(servers, served_after):
    with stream(servers, "job-12", 300) as longer:
        next(longer)
        for rid in ("job-1", "\0"):
            with stream(servers, rid, 300) as events:
                next(events)
        *_, last = longer
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}


def test_a_prefill_server_that_is_silent_delays_nobody(servers, served_after):
    with socket.create_server((HOST, 0)) as silent, ThreadPoolExecutor(1) as pool:
        place = {
            "bootstrap_host": HOST,
            "bootstrap_port": silent.getsockname()[1],
            "bootstrap_room": 6,
        }
        with stream(servers, "other", 2000) as events:
            next(events)
            data = json.dumps(sampling() | place)
            pool.submit(post, servers.server_url("decode"), data, timeout_s=1)
            asked = [silent.accept()[0] for _ in range(2)]  # by the HTTP process and the scheduler
            for _ in range(50):
                next(events)
            for connection in asked:  # neither has given up yet
                connection.setblocking(False)
                assert connection.recv(4096)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
                connection.close()


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(servers, served_after, content_type):
    for url in (*map(servers.server_url, servers.servers), servers.url):
        status, _ = post(url, json.dumps(sampling()), content_type)
        assert 400 <= status < 500


@pytest.mark.slow
def test_a_body_of_100_megabytes_is_refused(servers, served_after):
    data = json.dumps(body(input_ids=[5] * 34_000_000))
    assert len(data) > 10**8
    for url in (*map(servers.server_url, servers.servers), servers.url):
        status, _ = post(url, data, timeout_s=60)
        assert 400 <= status < 500


async def _crowd(url, size):
    parts, data = urlsplit(url), json.dumps(sampling(max_new_tokens=2)).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {JSON}\r\nConnection: close\r\n"
    )
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def one():
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request)
            return int((await reader.read()).split(b" ", 2)[1])
        finally:
            writer.close()

    return await asyncio.wait_for(asyncio.gather(*(one() for _ in range(size))), 500)


@pytest.mark.slow
def test_2000_clients_at_once(servers, served_after):
    statuses = asyncio.run(_crowd(servers.url, 2000))
    assert len(statuses) == 2000
    assert statuses.count(200) >= 1000, {status: statuses.count(status) for status in statuses}
