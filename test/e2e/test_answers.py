"""What a request may ask for: a pair behind the router answers as one server of stock SGLang, or refuses by name."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from harness import scheduler_pid
from servers.group import Servers, flags
from servers.sglang_http import http_json, sse_events
from sglang_scout.plugin.http import LIMITS

OLD = version("sglang") == "0.5.15.post1"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
ATOL = 1e-3  # of log-probabilities, as in test_identity.py
# Times, ids and counts of the prefix cache and of the weights' updates differ.
IGNORED = {"id", "created", "cached_tokens", "cached_tokens_details", "weight_versions"}
IDS = [5, 6, 7, 8, 40, 41, 42, 50, 51, 60, 61, 70, 33, 34, 35, 36, 37, 90, 91, 92]
TEXT = "What is the capital of a small country?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
SOME_TOKENS = list(range(100, 300))


def native(sampling=None, **fields):
    sampling = {"temperature": 0, "max_new_tokens": 16, **(sampling or {})}
    prompt = {} if "text" in fields else {"input_ids": IDS}
    return "/generate", {"sampling_params": sampling, **prompt, **fields}


def completion(**fields):
    given = {"prompt": TEXT, "max_tokens": 16, "temperature": 0}
    return "/v1/completions", {"model": "m", **given, **fields}


def chat(**fields):
    given = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 16, "temperature": 0}
    return "/v1/chat/completions", {"model": "m", **given, **fields}


LOGPROBS = {"return_logprob": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SAME = {
    "text": native(text=TEXT),
    "stream": native(stream=True),
    "batch": native(input_ids=[IDS, IDS[:3]]),
    "logprobs": native(**LOGPROBS, top_logprobs_num=3, return_text_in_logprobs=True),
    "logprobs, stream": native(**LOGPROBS, top_logprobs_num=3, stream=True),
    "logprobs of the prompt": native(**LOGPROBS, logprob_start_len=0),
    "logprobs of its end": native(**LOGPROBS, logprob_start_len=17),
    "logprobs, one token": native({"max_new_tokens": 1}, **LOGPROBS, logprob_start_len=0),
    "frequency_penalty": native({"frequency_penalty": 1.5}, **LOGPROBS),
    "repetition_penalty": native({"repetition_penalty": 1.5}, **LOGPROBS),
    "presence_penalty": native({"presence_penalty": 1.5}, **LOGPROBS),
    "stop": native({"stop": ["e"], "max_new_tokens": 40}),
    "stop, stream": native({"stop": "e", "max_new_tokens": 40}, stream=True),
    "no_stop_trim": native({"stop": ["e"], "no_stop_trim": True, "max_new_tokens": 40}),
    "stop_token_ids": native({"stop_token_ids": SOME_TOKENS}, **LOGPROBS),
    "stop at the first token": native({"stop_token_ids": list(range(500))}, **LOGPROBS),
    "min_new_tokens": native({"stop_token_ids": SOME_TOKENS, "min_new_tokens": 6}, **LOGPROBS),
    "no token": native({"max_new_tokens": 0}),
    "temperature": native({"temperature": 0.7, "top_k": 1}, **LOGPROBS),
    "completion": completion(),
    "completion, stream": completion(**USAGE),
    "completion, list": completion(prompt=[TEXT, "A page that matters"]),
    "completion, logprobs": completion(logprobs=2),
    "completion, logprobs, stream": completion(logprobs=2, stream=True),
    "completion, echo": completion(echo=True),
    "completion, logit_bias": completion(logit_bias={"50": 100.0}),
    "completion, stop_regex": completion(stop_regex="[a-e]"),
    "completion, penalties": completion(frequency_penalty=1.5, presence_penalty=0.5, logprobs=1),
    "chat": chat(),
    "chat, stream": chat(**USAGE),
    "chat, logprobs": chat(logprobs=True, top_logprobs=2),
}
# A CPU has none with the older SGLang, where test_bad_requests.py has one.
GRAMMARS = {
    "regex": native({"regex": "[0-9]{4}abc"}, **LOGPROBS),
    "regex, stream": native({"regex": "[0-9]{4}abc"}, stream=True),
    "json_schema": native({"json_schema": json.dumps(SCHEMA)}, **LOGPROBS),
    "ebnf": native({"ebnf": 'root ::= "yes" | "no" [0-9]'}, **LOGPROBS),
    "completion, response_format": completion(response_format={"type": "json_object"}),
    "chat, json_schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    ),
    "chat, tools": chat(tools=TOOLS, tool_choice="required", max_tokens=40),
    "chat, tools, stream": chat(tools=TOOLS, tool_choice="required", max_tokens=40, stream=True),
}
if OLD:
    GRAMMARS.clear()
# SGLang's router does not pass these fields of /generate on. What the pair answers when it is asked directly.
CONST = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
DROPPED = {
    "logit_bias": (native({"logit_bias": {"50": 100.0}}), {"output_ids": [50] * 16}),
    "stop_regex": (native({"stop_regex": "[a-e]"}), {"finish_reason.type": "stop"}),
    "structural_tag": (native({"structural_tag": json.dumps(CONST)}), {"text": "yes"}),
}
if OLD:
    del DROPPED["structural_tag"]


@pytest.fixture(scope="module")
def stock(tiny_model) -> Iterator[str]:
    arguments = flags(dtype="float32", max_total_tokens=8192, max_running_requests=8)
    with Servers(tiny_model("qwen3"), {"stock": arguments}) as servers:
        yield servers.server_url("stock")


def answer(url, path, body):
    if not body.get("stream"):
        return http_json(url + path, body, timeout_s=60)
    events = list(sse_events(url + path, body, timeout_s=60))
    if path == "/generate":
        return events[-1]
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice.get("delta", choice) for choice in choices]
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "text": "".join(part.get("text") or part.get("content") or "" for part in parts),
        "calls": "".join(call.get("name") or call["arguments"] for call in calls),
        "logprobs": [value for some in logprobs for value in some["token_logprobs"]],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": next((event["usage"] for event in events[::-1] if event.get("usage")), None),
    }


def differences(expected, actual, where="answer") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in (expected.keys() | actual.keys()) - IGNORED:
            if not key.endswith(("latency", "_ts", "_time", "_throughput")):
                yield from differences(expected.get(key), actual.get(key), f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list):
        for i, pair in enumerate(itertools.zip_longest(expected, actual)):
            yield from differences(*pair, f"{where}[{i}]")
    elif isinstance(expected, float) and isinstance(actual, float):
        if not abs(expected - actual) <= ATOL:
            yield f"{where} is {actual}, not {expected}"
    elif expected != actual:
        yield f"{where} is {actual!r}, not {expected!r}"


@pytest.mark.slow  # starts one more server; test_identity.py compares tokens in every run
@pytest.mark.parametrize("feature", SAME | GRAMMARS)
def test_the_answer_is_that_of_one_server(servers, stock, feature):
    expected, actual = (answer(url, *(SAME | GRAMMARS)[feature]) for url in (stock, servers.url))
    assert not list(differences(expected, actual))


@pytest.mark.parametrize("field", DROPPED)
def test_the_router_drops_a_field_and_the_servers_do_not(servers, field):
    (path, body), expected = DROPPED[field]

    def found(raw):
        seen = {**raw, "finish_reason.type": raw["meta_info"]["finish_reason"]["type"]}
        return {name: seen[name] for name in expected}

    assert found(servers.ask_pair(body, path=path)) == expected
    assert found(answer(servers.url, path, body)) != expected, "say so in the docs"
    assert f"`{field}`" in section()


def test_a_prefill_server_is_healthy_however_long_its_step_takes(servers):
    scheduler = scheduler_pid(servers, "prefill")
    os.kill(scheduler, signal.SIGSTOP)
    try:
        http_json(servers.server_url("prefill") + "/health", timeout_s=5)  # as SGLang's router
    finally:
        os.kill(scheduler, signal.SIGCONT)


def test_every_limit_is_documented():
    assert not [field for field in LIMITS if f"`{field}`" not in section()]


def section() -> str:
    return DOCS.read_text().partition("## What a request may ask for")[2].partition("\n## ")[0]
