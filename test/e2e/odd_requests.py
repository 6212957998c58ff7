"""Requests with odd fields: every field of the installed SGLang, with values of any type and range, and what the
servers answer."""

import ast
import copy
import functools
import importlib.util
import json
import math
import random
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.group import HOST
from servers.pd_cluster import PDCluster
from servers.sglang_http import NO_ANSWER, exchange

ANSWER_S = 20
"""Timeout of one request, on a busy machine."""
IDS = list(range(20, 40))
SAMPLING = {"temperature": 0, "max_new_tokens": 4}

SGLANG = Path(importlib.util.find_spec("sglang").origin).parent / "srt"  # not imported: ten seconds
PROTOCOL, REQUESTS = "entrypoints/openai/protocol.py", "managers/io_struct.py"
TYPES = {
    "/generate": (REQUESTS, "GenerateReqInput"),
    "/v1/completions": (PROTOCOL, "CompletionRequest"),
    "/v1/chat/completions": (PROTOCOL, "ChatCompletionRequest"),
    "/encode": (REQUESTS, "EmbeddingReqInput"),
}
BOTH = ("prefill", "decode")
OPENAI = {"model": "any", "temperature": 0, "max_tokens": 4}
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": IDS, "sampling_params": SAMPLING},
    "/v1/completions": OPENAI | {"prompt": IDS},
    "/v1/chat/completions": OPENAI | {"messages": [{"role": "user", "content": "Hi."}]},
    "/encode": {"input_ids": IDS},
}
PROMPTS = {"text", "input_ids", "input_embeds"}
LENGTHS = {"sampling_params.max_new_tokens", "max_tokens", "max_completion_tokens"}

# For every field. Most are of a wrong type or range, whichever it is.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 20, 129, -1, -5, 0.5, -0.5, 10**6, 2**31, -(2**31) - 1, 2**63, 2**64, 2**70, -(2**70),
    10**400, 10**4000, 1e30, 1e308, math.nan, math.inf, -math.inf,
    "", "a", "5", "\ud800", "\0", "é" * 9, "x" * 100_000,
    [], [0], [5], [-5], [999_999], [2**70], [0.5], [math.nan], [True], [None], ["a"], ["a", "a"], [[]], [[5]], [["a"]],
    [[[5]]], [{}], [5] * 1000, {}, {"a": 1}, {"5": -5}, {"5": "a"}, {"5": None}, {"a": {"b": [1]}}, {"": []},
)  # fmt: skip
MORE_VALUES: dict[str, tuple[Any, ...]] = {
    "input_ids": ([[5, 6], [7, 8]], [5, 2**31], [5, 2**63], [5, -1], [5] * 40_000, [True, False]),
    "text": (["a b", "c d"], "a " * 40_000),
    "prompt": ([[5, 6], [7, 8]], ["a b", "c d"], [5, 2**63], [5] * 40_000, "a " * 40_000),
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
    "stop_regex": ("(((", ["("], ["a*"] * 100, "(a+)+$"),
    "return_hidden_states": ("last", "all", "last_token"),
    "rid": (["a", "b"], "a/../b", "health_check", "HEALTH_CHECK_1"),
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

    if name not in classes:
        return []
    bases = [field for base in classes[name].bases for field in fields_of(file, ast.unparse(base))]
    own = [node.target.id for node in classes[name].body if isinstance(node, ast.AnnAssign)]
    return [*dict.fromkeys(bases + [field for field in own if field[0] != "_"])]


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
