"""Odd values in the fields of SGLang's requests: each request gets an answer or a 4xx, from both servers of a pair
alike, and the same processes serve the next one with the same tokens."""

import copy
import functools
import http.client
import json
import math
import random
import re
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness import SCOUT, STEADY, PDCluster, random_prompts, scheduler_pid, wait_until
from servers.pd_cluster import HOST, flags

# In a process of its own, as importing SGLang takes ten seconds and starts threads.
_READ_FIELDS = """
import dataclasses, json, msgspec
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
sampling = ["sampling_params." + field.name for field in msgspec.structs.fields(SamplingParams)]
print(json.dumps({
    "/generate": sampling + [field.name for field in dataclasses.fields(GenerateReqInput)],
    "/v1/completions": list(CompletionRequest.model_fields),
    "/v1/chat/completions": list(ChatCompletionRequest.model_fields),
    "/encode": [field.name for field in dataclasses.fields(EmbeddingReqInput)],
}))
"""

BOTH = ("prefill", "decode")
IDS = list(range(20, 40))
SAMPLING = {"temperature": 0, "max_new_tokens": 4}
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": IDS, "sampling_params": SAMPLING},
    "/v1/completions": {"model": "any", "prompt": IDS, "temperature": 0, "max_tokens": 4},
    "/v1/chat/completions": {
        "model": "any", "messages": [{"role": "user", "content": "Hi."}], "temperature": 0, "max_tokens": 4,
    },
    "/encode": {"input_ids": IDS},
}  # fmt: skip
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


GIVE_UP_S = 4
IN_FLIGHT = 12  # of max_running_requests=16
NEXT = random_prompts([300], seed=3)


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
        if self.to != ("router",):
            prompts = body.get("input_ids") or body.get("text") or body.get("prompt")
            many = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
            places = range(len(prompts)) if many else (0,)
            room = uuid.uuid4().int >> 66  # 62 bits; each prompt of a batch needs its own
            meeting = {"host": HOST, "port": bootstrap_port, "room": room}
            for key, value in meeting.items():
                values = [value + place if key == "room" else value for place in places]
                body.setdefault("bootstrap_" + key, values if many else value)
        return body


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:40]}... ({len(text)} characters)"


@functools.cache
def read_fields() -> dict[str, list[str]]:
    """Endpoint to the fields that its request may have, of the SGLang that is installed."""
    command = [sys.executable, "-c", _READ_FIELDS]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


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
        both = set(chance.choices(read_fields()[path], k=chance.choice((1, 2))))
        odd = {name: chance.choice(values_of(name, silent_port)) for name in sorted(both)}
        ways = [BOTH, BOTH, ("router",), BOTH]
        if any(name.startswith("bootstrap") for name in both):
            ways += [("prefill",), ("decode",), ("decode",)]
        to = chance.choice(ways)
        found.append(Case(path, odd, to, stream=chance.random() < 0.3))
    return found


def send(servers: PDCluster, case: Case) -> dict[str, int | str]:
    """Server to the status of its answer, "hung" if there was none before the client gave up, or an error.

    A stream has answered with its first event. The status of a failure inside an answer counts as the answer's.
    """
    data = json.dumps(case.body(servers.bootstrap_port)).encode()

    def one(name: str) -> int | str:
        url = servers.url if name == "router" else servers.server_url(name)
        parts, deadline = urlsplit(url), time.monotonic() + GIVE_UP_S
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=GIVE_UP_S)
        try:
            connection.request("POST", case.path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = b""
            while (more := response.read1()) and time.monotonic() < deadline:
                text += more
            inside = re.search(rb'"(?:status_)?code": ?(\d{3})\b', text)
            return int(inside[1]) if inside and response.status == 200 else response.status
        except TimeoutError:
            return "hung"
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()

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
    for server in servers.servers.values():
        server.check()
    return {name: scheduler_pid(servers, name) for name in servers.servers}


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
    pids, expected = schedulers(servers), tokens(servers)
    for at in range(0, len(cases), IN_FLIGHT):
        group = cases[at : at + IN_FLIGHT]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = list(pool.map(lambda case: send(servers, case), group))
        # On a busy machine one may be late: it is asked again, alone.
        suspects = [
            case for case, answer in zip(group, answers, strict=True) if wrong_answer(case, answer)
        ]
        faults = {str(case): wrong_answer(case, send(servers, case)) for case in suspects}
        assert not any(faults.values()), faults
        assert schedulers(servers) == pids, list(map(str, group))
        assert tokens(servers) == expected, list(map(str, group))
    wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 30)


def test_a_sample_of_requests_with_odd_fields(servers, silent_port):
    send_all(servers, sampled_cases(60, seed=1, silent_port=silent_port))


@pytest.mark.slow
def test_requests_with_odd_fields(tiny_model, silent_port):
    # Halves without the other are ended while the test runs.
    limits = ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    with PDCluster(
        tiny_model("qwen3"),
        server_args=SCOUT + flags(kv_offload_config=json.dumps(STEADY)),
        max_running_requests=16,
        env=dict.fromkeys(limits, "10"),
    ) as servers:
        send_all(servers, sampled_cases(2000, seed=2, silent_port=silent_port))
