"""The engine of CUDA devices on real servers: on the CPU device, with the ring's kernels interpreted.

What SGLang does to requests and pages is the same as with a device; only graphs and streams are not here.
"""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import PDCluster, assert_same_tokens, random_prompts, wait_until

LENGTHS = [31, 64, 900, 97, 700]


def cluster(model, *, budget=512, env=None, **config):
    settings = {"step_engine": "device", **config}
    return PDCluster(
        model,
        server_args=[
            *("--kv-offload", "scout", "--kv-offload-budget", str(budget)),
            *("--kv-offload-config", json.dumps(settings)),
        ],
        max_running_requests=6,
        max_total_tokens=16384,
        env={"TRITON_INTERPRET": "1", **(env or {})},
    )


@pytest.mark.timeout(900)
def test_tokens_equal_stock_and_small_budgets_keep_to_their_pages(tiny_model):
    model = tiny_model("qwen3")
    prompts = random_prompts(LENGTHS, seed=11)
    with PDCluster(model, max_running_requests=6, max_total_tokens=16384) as stock:
        expected = stock.generate(prompts, max_new_tokens=40, logprobs=True)
    with cluster(model, budget=1024) as servers:
        actual = servers.generate(prompts, max_new_tokens=40, logprobs=True)
        assert_same_tokens(expected, actual, logprob_atol=1e-3)
        assert servers.kv_offload()["cpu_pages"] == 0
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    # Newcomers recall what they miss at first, then next to nobody does: every step misses pages.
    scarce = {"recall": "fixed", "recall_interval": 50, "resident_tokens": 32}
    with cluster(model, budget=128, verify=True, env=environment, **scarce) as servers:
        answers = servers.generate(prompts, max_new_tokens=40)
        assert [len(a.output_ids) for a in answers] == [40] * len(prompts)
        before = servers.kv_offload()
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(servers.generate, prompts[2:], max_new_tokens=80)
            wait_until("steps", lambda: servers.kv_offload()["steps"] > before["steps"] + 20, 60)
            os.kill(before["worker"]["pid"], signal.SIGSTOP)  # found out after 0.8 s
            assert [len(a.output_ids) for a in again.result()] == [80] * 3
        state = servers.kv_offload()
        assert state["verify_checks"] > 4 * 40
        assert 0 < state["verify_max_rel_error"] <= 1e-5
        assert state["cpu_pages"] > 0 and state["recalled_pages"] > 0
        assert state["fallback_pages"] > 0, "the attendant answered for the silent worker"
        assert state["worker"]["restarts"] == 1
        assert state["host_pages_used"] == 0
        log = servers.servers["decode"].log()
        assert re.search(r"retracted_reqs: [1-9]", log), "no request was retracted"
