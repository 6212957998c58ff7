"""Greedy decoding through prefill server, router and decode server gives stock SGLang's tokens, as long as the budget
covers the context. Beyond it every layer agrees with a plain reference over the same pages."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from harness import (
    CPUS,
    GRAPH,
    LENGTHS,
    NEW_TOKENS,
    RADIX,
    RANKS_ENV,
    SHORT,
    SMALL_BUDGET_TOKENS,
    PDCluster,
    assert_same_tokens,
    random_prompts,
    stock_answers,
    wait_for_steps,
    wait_for_worker,
    wait_until,
)
from servers.group import flags

LOGPROB_ATOL = 1e-3
"""Two fp32 attention implementations with different summation orders, over four layers."""

FP8_LOGPROB_ATOL = 0.2
"""Keys that differ in their last digits may be rounded to adjacent fp8 values, an eighth or a quarter apart, which is
visible in a request of a few tokens: 0.04 was seen."""

SLOW = pytest.mark.slow
RANKS = flags(tp_size=2, kv_offload="scout", kv_offload_budget=SMALL_BUDGET_TOKENS)
RECALL_SOMETIMES = {"verify": True, "recall": "fixed", "recall_interval": 4}
PROMPTS = random_prompts(LENGTHS, seed=7)
LONG = random_prompts([900, 640, 1500, 37], seed=3)


def generate(servers, which="router", prompts=PROMPTS, **more):
    return servers.generate(prompts, which, max_new_tokens=NEW_TOKENS, logprobs=True, **more)


def assert_verified(state):
    assert state["verify_checks"] == 4 * state["steps"]
    assert 0 < state["verify_max_rel_error"] <= 1e-5


def check_with_radix_cache(servers, expected, which):
    """All at once, again, two of them alone, and with an empty cache; every request's pages fit."""
    assert_same_tokens(expected, generate(servers, which), logprob_atol=LOGPROB_ATOL)
    first = servers.kv_offload(which)
    assert first["steps"] > NEW_TOKENS and first["selected_pages"] > 0
    again = generate(servers, which)
    assert_same_tokens(expected, again, logprob_atol=LOGPROB_ATOL)
    second = servers.kv_offload(which)
    assert sum(a.cached_tokens for a in again) > 1000, "the second round hits the prefix cache"
    received = second["digests_received"] - first["digests_received"]
    assert received < first["digests_received"] / 4, "cached pages have digests"
    assert second["digests_computed"] - first["digests_computed"] <= 2 * len(PROMPTS)
    assert second["host_pages_used"] > 0, "the radix cache holds pages"
    assert second["cpu_pages"] == 0, "everything fits: nothing is left to the CPU"
    servers.flush(which)
    assert servers.kv_offload(which)["host_pages_used"] == 0
    alone = generate(servers, which, PROMPTS[-2:], concurrency=1)
    assert_same_tokens(expected[-2:], alone, logprob_atol=LOGPROB_ATOL)
    # If starved for two seconds on a busy machine the worker is replaced, which costs no request.
    wait_for_worker(servers, which)


def test_tokens_equal_stock_with_the_radix_cache(expected, servers):
    check_with_radix_cache(servers, expected, "radix")


def test_short_requests_get_stock_s_tokens_through_the_router(expected, servers):
    few = [i for i, length in enumerate(LENGTHS) if length + NEW_TOKENS <= 128]
    answers = generate(servers, prompts=[PROMPTS[i] for i in few])
    assert_same_tokens([expected[i] for i in few], answers, logprob_atol=LOGPROB_ATOL)
    state = servers.kv_offload()
    assert state["digests_received"] > 0 and state["host_pages_used"] == 0


def test_graph_transport(expected, servers):
    """Stock's tokens if the budget covers the context, else plain attention to exactly the selected pages, through
    retractions and while the worker is stopped. SGLang handles requests and pages as with a device."""
    # Two at a time, whose pages fit the slots.
    short = generate(servers, "graph", PROMPTS[6:SHORT], concurrency=2)
    assert_same_tokens(expected[6:SHORT], short, logprob_atol=LOGPROB_ATOL)
    before = servers.kv_offload("graph")
    assert before["transport"] == "graph" and before["cpu_pages"] == 0
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(servers.generate, PROMPTS[-3:], "graph", max_new_tokens=NEW_TOKENS)
        wait_for_steps(servers, 10, "graph")
        # Read now: on an overloaded machine the worker may have been replaced meanwhile.
        worker = servers.kv_offload("graph")["worker"]
        os.kill(worker["pid"], signal.SIGSTOP)  # detected after 0.8 s
        assert [len(a.output_ids) for a in long.result()] == [NEW_TOKENS] * 3
    state = servers.kv_offload("graph")
    assert_verified(state)
    assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
    assert state["fallback_pages"] > 0, "the attendant answered for the silent worker"
    assert state["worker"]["restarts"] > worker["restarts"]
    servers.flush("graph")
    assert servers.kv_offload("graph")["host_pages_used"] == 0
    log = servers.servers["graph"].log()
    assert re.search(r"retracted_reqs: [1-9]", log), "no request was retracted"


@SLOW
@pytest.mark.parametrize("arch", ["glm4", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral"])
def test_other_models(stock_of, tiny_model, arch):
    expected = stock_of(arch)
    with PDCluster(
        tiny_model(arch),
        {"decode": RADIX},
        server_args=flags(kv_offload="scout", max_running_requests=16, max_total_tokens=32768),
        router_args=None,
    ) as servers:
        check_with_radix_cache(servers, expected, "decode")


@SLOW  # three minutes each
@pytest.mark.parametrize(
    ("arch", "transport"), [("qwen3", "host"), ("qwen3_moe", "host"), ("qwen3", "graph")]
)
def test_two_ranks(stock_of, tiny_model, tmp_path, arch, transport):
    """Requests that fit the budget get stock's tokens; for longer ones all ranks select the same pages, and every
    rank's layers agree with a plain reference. A worker's crash affects only its rank; both map the fault words."""
    trace = {"trace": str(tmp_path / "trace.json"), "trace_steps": 20}
    settings = GRAPH if transport == "graph" else RECALL_SOMETIMES | trace
    expected = stock_of(arch)[:SHORT]
    with PDCluster(
        tiny_model(arch),
        {"decode": flags(enable_metrics=True, kv_offload_config=json.dumps(settings))},
        server_args=RANKS + flags(max_running_requests=6, max_total_tokens=32768),
        env={**RANKS_ENV, **({"TRITON_INTERPRET": "1"} if transport == "graph" else {})},
    ) as servers:
        if transport == "host":
            answers = generate(servers, prompts=PROMPTS[:SHORT])
            assert_same_tokens(expected, answers, logprob_atol=LOGPROB_ATOL)
            assert servers.kv_offload()["cpu_pages"] == 0
        servers.generate(LONG, max_new_tokens=30)
        state = servers.kv_offload()
        ranks = state["ranks"]
        assert state["tp_size"] == 2 and state["digests_received"] > 0
        assert state["transport"] == transport
        assert len(ranks) == 2 and ranks[0]["worker"] == state["worker"]
        for rank in ranks:
            assert_verified(rank | {"steps": state["steps"]})
            assert rank["verify_unequal_selections"] == 0
            assert rank["selected_pages"] == state["selected_pages"]
            assert rank["cpu_pages"] > 0
            assert rank["recalled_pages"] > 0 or transport == "graph"
        # Each close to its rank.
        assert [rank["worker"]["cpus"] for rank in ranks] == [[CPUS[0]], [CPUS[-1]]]
        if transport == "graph":
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in servers.processes()]
            shared = [re.search(r"(\d+) +/memfd:sglang-scout-ranks", text) for text in maps]
            inodes = [found[1] for found in shared if found]
            assert len(inodes) == 2 and len(set(inodes)) == 1
            return
        assert (tmp_path / "trace.json").exists() and (tmp_path / "trace.rank1.json").exists()

        worker = ranks[1]["worker"]
        os.kill(worker["pid"], signal.SIGKILL)
        servers.generate(LONG, max_new_tokens=20)

        def replaced():
            now = servers.kv_offload()["ranks"][1]["worker"]
            return now["state"] == "ready" and now["restarts"] > worker["restarts"]

        wait_until("a new worker of rank 1", replaced, 60)
        for rank in servers.kv_offload()["ranks"]:
            assert rank["verify_unequal_selections"] == 0 and rank["verify_max_rel_error"] <= 1e-5
        text = servers.metrics()
        for rank in "01":
            assert re.search(rf'^sglang:kv_offload_worker_up{{.*tp_rank="{rank}"', text, re.M)


@SLOW
@pytest.mark.skipif(
    version("sglang") != "0.5.15.post1", reason="SGLang has no KV in fp8 on a CPU any more"
)
@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
def test_kv_in_fp8(tiny_model, fp8):
    """Stock's tokens if the budget covers the context; with a small one every layer agrees with a plain reference over
    the rounded pages, some computed by the worker."""
    model, dtype = tiny_model("qwen3"), flags(kv_cache_dtype=fp8)
    expected = stock_answers(model, PROMPTS, max_new_tokens=NEW_TOKENS, kv_cache_dtype=fp8)
    small = flags(kv_offload_budget=128, kv_offload_config=json.dumps(RECALL_SOMETIMES))
    with PDCluster(
        model,
        {"small": small},
        server_args=dtype
        + flags(kv_offload="scout", max_running_requests=16, max_total_tokens=32768),
    ) as servers:
        assert_same_tokens(expected, generate(servers), logprob_atol=FP8_LOGPROB_ATOL)
        state = servers.kv_offload()
        assert state["digests_received"] > 0 and state["cpu_pages"] == 0
        generate(servers, "small", PROMPTS[-6:])
        state = servers.kv_offload("small")
        assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
        assert state["worker"]["pages"] > 0
        assert_verified(state)
