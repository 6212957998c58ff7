"""With a budget that covers the context, in fp32, greedy tokens equal those of stock SGLang.

Lengths are ragged, at and next to page boundaries; batches have 1 to 16 requests. Two tensor-parallel ranks give the
tokens of one.
"""

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
    RANKS_ENV,
    PDCluster,
    assert_same_tokens,
    random_prompts,
    stock_answers,
    wait_until,
)
from servers.pd_cluster import flags

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 257, 300, 415, 511, 512, 513, 700)
NEW_TOKENS = 40  # crosses a page boundary for every prompt
BUDGET_TOKENS = 1024
LOGPROB_ATOL = 1e-3
"""Two fp32 attention implementations with different summation orders, over four layers."""

FP8_LOGPROB_ATOL = 0.2
"""Keys that differ in their last digits may be rounded to adjacent fp8 values, an eighth or a quarter apart, which is
visible in a request of a few tokens: 0.04 was seen."""

SCOUT = ("--kv-offload", "scout", "--kv-offload-budget", str(BUDGET_TOKENS))
SLOW = pytest.mark.slow
ARCHITECTURES = pytest.mark.parametrize(
    "servers",
    [
        "qwen3",
        *(
            pytest.param(arch, marks=SLOW)
            for arch in ("glm4", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral")
        ),
    ],
    indirect=True,
)
RANKS_BUDGET_TOKENS = 320
RANKS = flags(tp_size=2, kv_offload="scout", kv_offload_budget=RANKS_BUDGET_TOKENS)
SHORT = 10  # the first LENGTHS that fit this budget with their output
# Only new requests recall, at first: every step misses pages.
GRAPH = {"transport": "graph", "verify": True, "resident_tokens": 32}
GRAPH |= {"recall": "fixed", "recall_interval": 50}
GRAPH_ARGS = flags(
    kv_offload_budget=RANKS_BUDGET_TOKENS,
    kv_offload_config=json.dumps(GRAPH),
    max_running_requests=6,
    max_total_tokens=16384,
    disaggregation_decode_enable_radix_cache=True,
)


@pytest.fixture(scope="module")
def stock(tiny_model, tmp_path_factory):
    """Answers of stock SGLang, per architecture; computed once."""
    known = {}

    def answers(arch):
        if arch not in known:
            known[arch] = stock_answers(
                tiny_model(arch),
                tmp_path_factory.mktemp("stock"),
                random_prompts(LENGTHS, seed=7),
                max_new_tokens=NEW_TOKENS,
            )
            # A model that repeats one token would always agree.
            assert min(len(set(a.output_ids)) for a in known[arch]) >= 5
        return known[arch]

    return answers


@SLOW  # three minutes each
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_two_ranks(stock, tiny_model, tmp_path, arch):
    """Requests that fit the budget get stock's tokens; for longer ones all ranks select the same pages, and every
    rank's layers agree with a plain reference. A worker's crash affects only its rank."""
    settings = {"verify": True, "recall": "fixed", "recall_interval": 4}
    settings |= {"trace": str(tmp_path / "trace.json"), "trace_steps": 20}
    expected = stock(arch)[:SHORT]
    with PDCluster(
        tiny_model(arch),
        server_args=RANKS,
        decode_args=["--enable-metrics", "--kv-offload-config", json.dumps(settings)],
        max_running_requests=16,
        max_total_tokens=32768,
        env=RANKS_ENV,
    ) as servers:
        prompts = random_prompts(LENGTHS, seed=7)[:SHORT]
        answers = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, answers, logprob_atol=LOGPROB_ATOL)
        assert servers.kv_offload()["cpu_pages"] == 0

        long = random_prompts([900, 640, 1500, 37], seed=3)
        servers.generate(long, max_new_tokens=30)
        state = servers.kv_offload()
        assert state["tp_size"] == 2 and state["digests_received"] > 0
        ranks = state["ranks"]
        assert len(ranks) == 2 and ranks[0]["worker"] == state["worker"]
        for rank in ranks:
            assert rank["verify_checks"] == 4 * state["steps"]
            assert 0 < rank["verify_max_rel_error"] <= 1e-5
            assert rank["verify_unequal_selections"] == 0
            assert rank["selected_pages"] == state["selected_pages"]
            assert rank["cpu_pages"] > 0 and rank["recalled_pages"] > 0
        # Each close to its rank.
        assert [rank["worker"]["cpus"] for rank in ranks] == [[CPUS[0]], [CPUS[-1]]]
        assert (tmp_path / "trace.json").exists() and (tmp_path / "trace.rank1.json").exists()

        restarts = ranks[1]["worker"]["restarts"]
        os.kill(ranks[1]["worker"]["pid"], signal.SIGKILL)
        servers.generate(long, max_new_tokens=20)
        wait_until(
            "a new worker of rank 1",
            lambda: (
                (worker := servers.kv_offload()["ranks"][1]["worker"])["state"] == "ready"
                and worker["restarts"] > restarts
            ),
            60,
        )
        state = servers.kv_offload()
        assert [rank["verify_unequal_selections"] for rank in state["ranks"]] == [0, 0]
        assert max(rank["verify_max_rel_error"] for rank in state["ranks"]) <= 1e-5
        text = servers.metrics()
        for rank in "01":
            assert re.search(rf'^sglang:kv_offload_worker_up{{.*tp_rank="{rank}"', text, re.M)


@SLOW
def test_two_ranks_with_graph_transport(tiny_model):
    """Every layer of both ranks agrees with a plain reference; both map the fault words."""
    with PDCluster(
        tiny_model("qwen3"),
        server_args=RANKS,
        decode_args=["--kv-offload-config", json.dumps(GRAPH)],
        max_running_requests=6,
        max_total_tokens=16384,
        env={**RANKS_ENV, "TRITON_INTERPRET": "1"},
    ) as servers:
        servers.generate(random_prompts([900, 640, 37], seed=3), max_new_tokens=20)
        state = servers.kv_offload()
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in servers.processes()]
        shared = [re.search(r"(\d+) +/memfd:sglang-scout-ranks", text) for text in maps]
        inodes = [found[1] for found in shared if found]
        assert len(inodes) == 2 and len(set(inodes)) == 1
        assert state["transport"] == "graph"
        for rank in state["ranks"]:
            assert rank["cpu_pages"] > 0
            assert rank["verify_checks"] == 4 * state["steps"]
            assert 0 < rank["verify_max_rel_error"] <= 1e-5
            assert rank["verify_unequal_selections"] == 0


@SLOW
@pytest.mark.skipif(
    version("sglang") != "0.5.15.post1", reason="SGLang has no KV in fp8 on a CPU any more"
)
@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
def test_kv_in_fp8(tiny_model, tmp_path, fp8):
    """Stock's tokens if the budget covers the context; with a small one every layer agrees with a plain reference over
    the rounded pages, some computed by the worker."""
    model, prompts = tiny_model("qwen3"), random_prompts(LENGTHS, seed=7)
    expected = stock_answers(
        model, tmp_path, prompts, max_new_tokens=NEW_TOKENS, kv_cache_dtype=fp8
    )
    small = {"verify": True, "recall": "fixed", "recall_interval": 4}
    with PDCluster(
        model,
        server_args=[*SCOUT, "--kv-cache-dtype", fp8],
        more_decodes={"small": flags(kv_offload_budget=128, kv_offload_config=json.dumps(small))},
        max_running_requests=16,
        max_total_tokens=32768,
    ) as servers:
        answers = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, answers, logprob_atol=FP8_LOGPROB_ATOL)
        state = servers.kv_offload()
        assert state["digests_received"] > 0 and state["cpu_pages"] == 0
        servers.generate(prompts[-6:], "small", max_new_tokens=NEW_TOKENS)
        state = servers.kv_offload("small")
        assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
        assert state["worker"]["pages"] > 0
        assert state["verify_checks"] == 4 * state["steps"]
        assert 0 < state["verify_max_rel_error"] <= 1e-5


# From here on tests share servers, which run until the end of the file.


@pytest.fixture(scope="module")
def servers(request, stock, tiny_model):
    """A pair with the default settings. With the same prefill server a decode server with the radix cache, and one with
    the graph transport on the CPU, where the ring's kernels are interpreted, and retractions."""
    stock(request.param)  # now: its server must end before these start
    cluster = PDCluster(
        tiny_model(request.param),
        server_args=SCOUT,
        more_decodes={"radix": ["--disaggregation-decode-enable-radix-cache"], "graph": GRAPH_ARGS},
        max_running_requests=16,
        max_total_tokens=32768,
    )
    cluster.servers["graph"].env |= {
        "TRITON_INTERPRET": "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "20",
    }
    with cluster:
        yield cluster


@pytest.fixture
def expected(request, stock):
    return stock(request.node.callspec.params["servers"])


@ARCHITECTURES
def test_tokens_equal_stock(servers, expected):
    prompts = random_prompts(LENGTHS, seed=7)
    together = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
    assert_same_tokens(expected, together, logprob_atol=LOGPROB_ATOL)
    alone = servers.generate(prompts[-2:], max_new_tokens=NEW_TOKENS, logprobs=True, concurrency=1)
    assert_same_tokens(expected[-2:], alone, logprob_atol=LOGPROB_ATOL)
    state = servers.kv_offload()
    assert state["steps"] > NEW_TOKENS and state["selected_pages"] > 0
    assert state["cpu_pages"] == 0, "everything fits: nothing is left to the CPU"
    assert state["digests_received"] > 0 and state["host_pages_used"] == 0
    # If starved for two seconds on a busy machine the worker is replaced, which costs no request.
    wait_until("a worker", lambda: servers.kv_offload()["worker"]["state"] == "ready", 60)


@ARCHITECTURES
def test_tokens_equal_stock_with_the_radix_cache(servers, expected):
    prompts = random_prompts(LENGTHS, seed=7)

    def check():
        answers = servers.generate(prompts, "radix", max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, answers, logprob_atol=LOGPROB_ATOL)
        return answers, servers.kv_offload("radix")

    _, first = check()
    again, second = check()
    assert sum(a.cached_tokens for a in again) > 1000, "the second round hits the prefix cache"
    received = second["digests_received"] - first["digests_received"]
    assert received < first["digests_received"] / 4, "cached pages have digests"
    assert second["digests_computed"] - first["digests_computed"] <= 2 * len(prompts)
    assert second["host_pages_used"] > 0, "the radix cache holds pages"
    servers.flush("radix")
    assert servers.kv_offload("radix")["host_pages_used"] == 0
    check()


@pytest.mark.parametrize("servers", ["qwen3"], indirect=True)
def test_graph_transport(servers, expected):
    """Stock's tokens if the budget covers the context, else plain attention to exactly the selected pages, through
    retractions and while the worker is stopped. SGLang handles requests and pages as with a device."""
    prompts = random_prompts(LENGTHS, seed=7)
    # Two at a time, whose pages fit the slots.
    short = servers.generate(
        prompts[6:SHORT], "graph", max_new_tokens=NEW_TOKENS, logprobs=True, concurrency=2
    )
    assert_same_tokens(expected[6:SHORT], short, logprob_atol=LOGPROB_ATOL)
    before = servers.kv_offload("graph")
    assert before["transport"] == "graph" and before["cpu_pages"] == 0
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(servers.generate, prompts[-3:], "graph", max_new_tokens=2 * NEW_TOKENS)
        wait_until(
            "steps", lambda: servers.kv_offload("graph")["steps"] > before["steps"] + 20, 120
        )
        # Read now: on an overloaded machine the worker may have been replaced meanwhile.
        worker = servers.kv_offload("graph")["worker"]
        os.kill(worker["pid"], signal.SIGSTOP)  # detected after 0.8 s
        assert [len(a.output_ids) for a in long.result()] == [2 * NEW_TOKENS] * 3
    state = servers.kv_offload("graph")
    assert state["verify_checks"] == 4 * state["steps"]
    assert 0 < state["verify_max_rel_error"] <= 1e-5
    assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
    assert state["fallback_pages"] > 0, "the attendant answered for the silent worker"
    assert state["worker"]["restarts"] > worker["restarts"]
    servers.flush("graph")
    assert servers.kv_offload("graph")["host_pages_used"] == 0
    log = servers.servers["graph"].log()
    assert re.search(r"retracted_reqs: [1-9]", log), "no request was retracted"
