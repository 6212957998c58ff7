"""Invalid, odd, huge or excessive requests to both servers and the router: each gets an answer or a 4xx, from both
servers of a pair alike, and the same processes serve the next one with the same tokens."""

import ast
import asyncio
import contextlib
import copy
import functools
import importlib.util
import json
import math
import random
import re
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness import random_prompts, scheduler_pid, wait_idle
from servers.group import HOST
from servers.pd_cluster import PDCluster
from servers.sglang_http import JSON, NO_ANSWER, exchange, http_json, sse_events

ANSWER_S = 20
"""Timeout of one request, on a busy machine."""
GIVE_UP_S = 4  # of a client with an odd request
IN_FLIGHT = 12  # of max_running_requests=16
CONTEXT = 32768  # of the tiny model
NEXT = random_prompts([300], seed=3)
IDS = list(range(20, 40))
SAMPLING = {"temperature": 0, "max_new_tokens": 4}

# Invalid: a status of 400 or more is expected. More, without servers: test/plugin/test_http.py.
REFUSED: dict[str, tuple[Any, ...]] = {
    "input_ids": (
        ["a", "b"], [1.5], [1, None], [1, [2]], [[[1]]], 5, {"a": 1}, [2**70], [10**6], [[1, 2], [-3]], [], [[]],
        [5] * CONTEXT,
    ),
    "text": ("", 5),
    "sampling_params.max_new_tokens": (-5, 10**12, "4"),
    "sampling_params.temperature": (-1, math.inf, math.nan, "hot"),
    "sampling_params.top_p": (2,),
    "sampling_params.top_k": (2**40,),
    "sampling_params.min_p": (9,),
    "sampling_params.frequency_penalty": (99,),
    "sampling_params.repetition_penalty": (0,),
    "sampling_params.stop_token_ids": (["a"],),
    "sampling_params.min_new_tokens": (100,),
    "sampling_params.logit_bias": ({"999999": 5.0}, {"5": 1e308}),
    "sampling_params.n": (3, 10**9),
    "sampling_params.regex": ("(((",),
    "sampling_params.json_schema": ("{bad",),
    "sampling_params.foo": (1,),
    "sampling_params": ("x",),
    "bootstrap_host": ([HOST], None),
}  # fmt: skip
NO_JSON = (b'{"input_ids": [5', b"", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b"{}")
# Has an answer, if a short one.
ANSWERED: dict[str, tuple[Any, ...]] = {
    "sampling_params.regex": ("[0-9]{4}abc",),
    "sampling_params.max_new_tokens": (0,),
    "sampling_params.temperature": (1e-300, 1e30),
    "sampling_params.stop_token_ids": ([10**12, -4],),
}

SGLANG = Path(importlib.util.find_spec("sglang").origin).parent / "srt"  # not imported: ten seconds
PROTOCOL, REQUESTS = "entrypoints/openai/protocol.py", "managers/io_struct.py"
TYPES = {
    "/generate": (REQUESTS, "GenerateReqInput"),
    "/v1/completions": (PROTOCOL, "CompletionRequest"),
    "/v1/chat/completions": (PROTOCOL, "ChatCompletionRequest"),
    "/encode": (REQUESTS, "EmbeddingReqInput"),
}
BOTH = ("prefill", "decode")
MESSAGES = [{"role": "user", "content": "Hi."}]
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": IDS, "sampling_params": SAMPLING},
    "/v1/completions": {"model": "any", "prompt": IDS, "temperature": 0, "max_tokens": 4},
    "/v1/chat/completions": {
        "model": "any",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 4,
    },
    "/encode": {"input_ids": IDS},
}
PROMPTS = {"text", "input_ids", "input_embeds"}
LENGTHS = {"sampling_params.max_new_tokens", "max_tokens", "max_completion_tokens"}

# For every field. Most are of a wrong type or range, whichever it is.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, -5, 0.5, -0.5, 2**31, -(2**31) - 1, 2**63, 2**64, 2**70, -(2**70), 10**400,
    10**4000, 1e30, 1e308, math.nan, math.inf, -math.inf,
    "", "a", "5", "\ud800", "\0", "é" * 9, "x" * 100_000,
    [], [0], [5], [-5], [2**70], [0.5], [math.nan], [True], [None], ["a"], ["a", "a"], [[]], [[5]], [["a"]], [[[5]]],
    [{}], [5] * 1000, {}, {"a": 1}, {"5": -5}, {"5": "a"}, {"5": None}, {"a": {"b": [1]}}, {"": []},
)  # fmt: skip
MORE_VALUES: dict[str, tuple[Any, ...]] = {
    "input_ids": ([[5, 6], [7, 8]], [5, 2**31], [5, 2**63], [5, -1], [5] * 40_000, [True, False]),
    "text": (["a b", "c d"], "a " * 40_000),
    "prompt": ([[5, 6], [7, 8]], ["a b", "c d"], [5, 2**63], [5, -1], [5] * 40_000, "a " * 40_000),
    "input_embeds": ([[0.5] * 64], [[0.5] * 3], [[[0.5] * 64]], [[math.nan] * 64], [[1, [2]]]),
    "messages": (
        [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "x", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "assistant", "tool_calls": [{}]}],
    ),
    "sampling_params": ([SAMPLING], [SAMPLING, SAMPLING], [SAMPLING, None], [None], SAMPLING | {"": 1}),
    "regex": ("(((", "a{100000}", "(a|b)*" * 50, r"\p{", "(?=a)"),
    "json_schema": ("{bad", "{}", '{"type": 5}', '{"$ref": "#"}', '{"type": "string", "pattern": "((("}'),
    "ebnf": ("root ::=", "root ::= root", 'x ::= "a"', 'root ::= "a" b'),
    "structural_tag": ("{}", "[]", '{"structures": [], "triggers": []}', '{"type": "structural_tag", "format": {}}'),
    "response_format": (
        {"type": "json_object"}, {"type": "x"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}}, {"type": "structural_tag"},
    ),
    "logit_bias": ({"-1": 1}, {"999999": 1}, {str(2**70): 1}, {"5": math.nan}, {"5": 1e308}, {"5": [1]}, {"0.5": 1}),
    "stop": ([""], ["a"] * 1000, ["a", 5]),
    "stop_regex": ("(((", ["("], ["a*"] * 100, "(a+)+$"),
    "stop_token_ids": ([2**63], [-1], [5] * 100_000),
    "top_logprobs_num": (5, 128, 129, 10**6),
    "top_logprobs": (5, 20, 129),
    "logprobs": (5, 129),
    "logprob_start_len": (10, 19, 20, 21, 32767),
    "token_ids_logprob": ([5, 6], [999_999], [-(2**40)], [5] * 5000),
    "return_hidden_states": ("last", "all", "last_token"),
    "routed_experts_start_len": (19, 20, 21),
    "rid": (["a", "b"], "a/../b", "health_check", "HEALTH_CHECK_1"),
    "modalities": (["image"],),
    "image_data": ("data:image/png;base64,AAAA", "/etc/passwd", [["a"]]),
    "session_params": ({"id": "none"}, {"id": 5}, {"rid": "a"}),
    "custom_params": ({"__sglang_reasoning_end_token_ids": [-1]}, {"a": [[1]]}),
    "tools": ([{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": 5}}]),
    "tool_choice": ("auto", "required", {"type": "function", "function": {"name": "f"}}),
    "stream_options": ({"include_usage": 5}, {"continuous_usage_stats": True}),
    "chat_template_kwargs": ({"messages": 5}, {"tokenize": False}, {"add_generation_prompt": "x"}),
    "bootstrap_host": ("256.256.256.256", "::1", "a b", "host:1", "http://x", "a.invalid", "[::", "127.0.0.1\n"),
    "bootstrap_port": (65535, 65536, "80", 22),
    "bootstrap_room": (77, 2**63 - 1, "77", [77, 78]),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One request; ``odd`` are the fields that it is about."""

    path: str
    odd: dict[str, Any]
    to: tuple[str, ...] = BOTH
    stream: bool = False

    def __str__(self) -> str:
        odd = ", ".join(f"{name}={shown(value)}" for name, value in self.odd.items())
        return f"{self.path} to {'+'.join(self.to)}{' streamed' * self.stream}: {odd}"

    def body(self, bootstrap_port: int) -> dict[str, Any]:
        """With a meeting point of its own, unless the case names one or the router does."""
        body = copy.deepcopy(BASE[self.path])
        if self.stream or any(self.odd.get(name, 1) is None for name in LENGTHS):
            body["stream"] = True  # of an answer to the context's end the beginning is enough
        if PROMPTS & set(self.odd):
            body.pop("input_ids", None)
        if any("logprob" in name for name in self.odd):
            wanted = {"/generate": ("return_logprob", True), "/v1/completions": ("logprobs", 1)}
            body.setdefault(*wanted.get(self.path, ("logprobs", True)))
        for name, value in self.odd.items():
            within, _, key = name.rpartition(".")
            into = body.setdefault(within, {}) if within else body
            if isinstance(into, dict):
                into[key] = value
        return body if self.to == ("router",) else meeting(bootstrap_port, body) | body


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:40]}... ({len(text)} characters)"


@functools.cache
def fields_of(file: str, name: str) -> list[str]:
    """Public fields of a class, of the SGLang that is installed."""
    tree = ast.parse((SGLANG / file).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> list[str]:
        if name not in classes:
            return []
        bases = [field for base in classes[name].bases for field in fields(ast.unparse(base))]
        own = [node.target.id for node in classes[name].body if isinstance(node, ast.AnnAssign)]
        return [*dict.fromkeys(bases + [field for field in own if field[0] != "_"])]

    return fields(name)


def fields_at(path: str) -> list[str]:
    sampling = fields_of("sampling/sampling_params.py", "SamplingParams")
    within = [f"sampling_params.{name}" for name in sampling] if path == "/generate" else []
    return within + fields_of(*TYPES[path])


def values_of(field: str, silent_port: int) -> list[Any]:
    """``silent_port``: one that accepts connections and never answers."""
    silent = [silent_port] if field == "bootstrap_port" else []
    return [*MORE_VALUES.get(field.rpartition(".")[2], ()), *silent, *VALUES]


def sampled_cases(count: int, seed: int, silent_port: int) -> list[Case]:
    """Of one field or two, by either way, streamed or not; the same for the same seed and release."""
    chance = random.Random(seed)
    paths = chance.choices(list(BASE), weights=(12, 4, 4, 1), k=count)
    found = []
    for path in paths:
        both = set(chance.choices(fields_at(path), k=chance.choice((1, 2))))
        odd = {name: chance.choice(values_of(name, silent_port)) for name in sorted(both)}
        ways = [BOTH, BOTH, ("router",), BOTH]
        if any(name.startswith("bootstrap") for name in both):
            ways += [("prefill",), ("decode",), ("decode",)]
        to = chance.choice(ways)
        found.append(Case(path, odd, to, stream=chance.random() < 0.3))
    return found


def meeting(bootstrap_port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Where the halves of a request meet; each prompt of a batch needs its own room."""
    prompts = body.get("input_ids") or body.get("text") or body.get("prompt")
    many = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)
    count, room = len(prompts) if many else 1, uuid.uuid4().int >> 66  # 62 bits
    places = {
        "bootstrap_host": [HOST] * count,
        "bootstrap_port": [bootstrap_port] * count,
        "bootstrap_room": [room + i for i in range(count)],
    }
    return places if many else {name: value[0] for name, value in places.items()}


def status_of(url: str, data: bytes, timeout_s: float = ANSWER_S) -> int | str:
    """The status of the answer, "hung" if there was none in time, or an error. A stream has answered with its first
    event. The status of a failure inside an answer counts as the answer's."""
    try:
        status, text = exchange(url, data, timeout_s=timeout_s)
    except TimeoutError:
        return "hung"
    except NO_ANSWER as error:
        return "hung" if "timed out" in str(error) else repr(error)
    inside = re.search(rb'"(?:status_)?code": ?(\d{3})\b', text)
    return int(inside[1]) if inside and status == 200 else status


def send(servers: PDCluster, case: Case, timeout_s: float = ANSWER_S) -> dict[str, int | str]:
    """Server to :func:`status_of`."""
    data = json.dumps(case.body(servers.bootstrap_port)).encode()

    def one(name: str) -> int | str:
        return status_of(servers.server_url(name) + case.path, data, timeout_s)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(case.to, pool.map(one, case.to), strict=True))


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


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 1), pytest.param(2000, 2, marks=pytest.mark.slow)]
)
def test_requests_with_odd_fields(servers, served_after, silent_port, count, seed):
    cases = sampled_cases(count, seed, silent_port)
    pids, expected = schedulers(servers), tokens(servers)
    for at in range(0, len(cases), IN_FLIGHT):
        group = cases[at : at + IN_FLIGHT]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = list(pool.map(lambda case: send(servers, case, GIVE_UP_S), group))
        # On a busy machine one may be late: it is asked again, alone.
        wrong = [case for case, a in zip(group, answers, strict=True) if wrong_answer(case, a)]
        faults = {str(case): wrong_answer(case, send(servers, case, GIVE_UP_S)) for case in wrong}
        assert not any(faults.values()), faults
        now = schedulers(servers), tokens(servers)
        assert now == (pids, expected), list(map(str, group))


def both(servers, **odd):
    """The statuses of both servers for a request, by the names of its odd fields."""
    return list(send(servers, Case("/generate", odd)).values())


def sampling(**values):
    return {"input_ids": IDS, "sampling_params": SAMPLING | values}


def test_what_makes_no_sense_is_refused(servers, served_after):
    for field, values in REFUSED.items():
        for value in values:
            statuses = both(servers, **{field: value})
            assert all(400 <= status < 600 for status in statuses), (field, value, statuses)
            # SGLang's router drops unknown fields, so there may be an answer.
            found = send(servers, Case("/generate", {field: value}, ("router",)))["router"]
            assert 200 <= found < 600, (field, value)
    for data in NO_JSON:
        for name in (*BOTH, "router"):
            assert 400 <= status_of(servers.server_url(name) + "/generate", data) < 600, (
                name,
                data,
            )


def test_what_is_odd_is_answered(servers, served_after):
    for field, values in ANSWERED.items():
        for value in values:
            assert both(servers, **{field: value}) == [200, 200], (field, value)


def test_what_only_one_server_refuses_ends_both_halves(servers, served_after):
    """The decode server's pool is smaller; the prefill server waits for a half that fails, without a limit here."""
    too_long = [5] * (CONTEXT - 100)
    assert both(servers, input_ids=too_long) == [400, 400]
    data = json.dumps({"input_ids": too_long, "sampling_params": SAMPLING}).encode()
    status, message = exchange(servers.url + "/generate", data, timeout_s=ANSWER_S)
    assert (status, b"--num-reserved-decode-tokens" in message) == (400, True)


def test_a_room_in_use_is_refused(servers, served_after):
    twice = {"sampling_params": SAMPLING | {"max_new_tokens": 200, "ignore_eos": True}}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: both(servers, **twice, bootstrap_room=5), range(2)))
    assert [sorted(of_one) for of_one in zip(*answers, strict=True)] == [[200, 400]] * 2


def test_a_room_of_which_something_is_left_is_refused(servers, served_after):
    # The prefill server hears of it, and that the client has left.
    assert send(servers, Case("/generate", {"bootstrap_room": 7}, ("decode",)), 1) == {
        "decode": "hung"
    }
    wait_idle(servers)
    assert both(servers, bootstrap_room=7) == [503, 503]


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
        place = meeting(silent.getsockname()[1], {})
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


def refused_by_all(servers, data, **options):
    for url in (*map(servers.server_url, BOTH), servers.url):
        assert 400 <= exchange(url + "/generate", data, **options)[0] < 500, url


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(servers, served_after, content_type):
    refused_by_all(servers, json.dumps(sampling()).encode(), content_type=content_type)


@pytest.mark.slow
def test_a_body_of_100_megabytes_is_refused(servers, served_after):
    data = json.dumps({"input_ids": [5] * 34_000_000}).encode()
    assert len(data) > 10**8
    refused_by_all(servers, data, timeout_s=60)


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
