"""Servers that are shared by several files, in the order of ``FILES``."""

import functools
import json

import pytest

from harness import (
    GRAPH,
    GRAPH_ENV,
    LENGTHS,
    NEW_TOKENS,
    RADIX,
    SCOUT,
    SMALL_BUDGET_TOKENS,
    TRACE_STEPS,
    PDCluster,
    random_prompts,
    stock_answers,
)
from servers.group import flags

# Those that share servers follow each other; test_faults.py kills one of them.
FILES = ("identity", "small_budget", "answers", "bad_requests", "worker_faults", "faults")
# Servers reach each other without it.
DEAD_PROXY = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9"
)
DEAD_PROXY |= {"no_proxy": "", "NO_PROXY": ""}
# Halves without the other end while the tests run.
LIMITS = ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
# Without recall and with room for everything a request's residency depends only on its own history, so its tokens are
# deterministic, and the worker has work in every step.
DECODE = {"recall": "off", "resident_tokens": 32768, "verify": True, "trace_steps": TRACE_STEPS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return FILES.index(name) if name in FILES else len(FILES)

    items.sort(key=lambda item: (item.path.parent.name == "e2e") * (1 + place(item)))


@pytest.fixture(scope="session")
def stock_of(tiny_model):
    """Stock SGLang's answers to prompts of LENGTHS by an architecture."""

    @functools.cache
    def answers(arch):
        prompts = random_prompts(LENGTHS, seed=7)
        found = stock_answers(tiny_model(arch), prompts, max_new_tokens=NEW_TOKENS)
        # A model that repeats one token would always agree.
        assert min(len(set(answer.output_ids)) for answer in found) >= 5
        return found

    return answers


@pytest.fixture(scope="session")
def expected(stock_of):
    """Before ``servers`` in a test's arguments, so that stock SGLang's server has ended when they start."""
    return stock_of("qwen3")


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    """The step log and the trace of the ``servers``' decode server."""
    folder = tmp_path_factory.mktemp("outputs")
    return {"step_log": folder / "steps.jsonl", "trace": folder / "trace.json"}


@pytest.fixture(scope="session")
def servers(tiny_model, outputs):
    """For files without their own: a pair with a small budget, and two further decode servers, one whose budget covers
    every prompt, one with the graph transport and retractions. The last test of test_faults.py ends them."""
    graph = flags(kv_offload_budget=SMALL_BUDGET_TOKENS, kv_offload_config=json.dumps(GRAPH))
    graph += flags(max_running_requests=6, max_total_tokens=16384)
    decode = flags(
        kv_offload_config=json.dumps(DECODE | {name: str(x) for name, x in outputs.items()}),
        max_total_tokens=32768,
        enable_metrics=True,
    )
    cluster = PDCluster(
        tiny_model("qwen3"),
        {
            "decode": decode,
            "radix": RADIX + flags(max_total_tokens=32768),
            "graph": graph + ["--disaggregation-decode-enable-radix-cache"],
        },
        server_args=SCOUT + flags(max_running_requests=16, max_total_tokens=49152),
        env=DEAD_PROXY | dict.fromkeys(LIMITS, "60"),
    )
    cluster.servers["graph"].env |= GRAPH_ENV
    with cluster:
        yield cluster
