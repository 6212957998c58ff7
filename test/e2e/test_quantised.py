"""Quantised weights on real servers, by a quantisation that runs on every CPU."""

import json
import os

import pytest

from harness import PDCluster, assert_same_tokens, random_prompts, stock_answers

LENGTHS = (1, 31, 33, 64, 257, 415, 512, 700)
BUDGET_TOKENS, SHORT = 320, 5  # so many of the lengths, with what is decoded, fit the budget
LAYERS, TOKENS = 4, 40
LOGPROB_ATOL = 1e-3  # as in test_identity


@pytest.mark.slow  # predictions through a quantised projection: test/plugin/test_support.py
def test_tokens_equal_stock_and_small_budgets_keep_to_their_pages(tiny_model, tmp_path):
    """Requests that fit the budget, then longer ones, whose queries are predicted through the projection."""
    quantised_linear = pytest.importorskip("quantised_linear", reason="needs SGLang")
    (tmp_path / "plugin").mkdir()
    path = quantised_linear.install(tmp_path / "plugin")
    env = {"PYTHONPATH": ":".join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    model = quantised_linear.quantised(tiny_model("qwen3"), tmp_path / "model")
    prompts = random_prompts(LENGTHS, seed=7)
    expected = stock_answers(model, tmp_path, prompts[:SHORT], max_new_tokens=TOKENS, env=env)
    scout = ("--kv-offload", "scout", "--kv-offload-budget", str(BUDGET_TOKENS))
    with PDCluster(
        model,
        server_args=scout,
        decode_args=["--kv-offload-config", json.dumps({"verify": True})],
        max_running_requests=8,
        max_total_tokens=16384,
        env=env,
    ) as servers:
        actual = servers.generate(prompts[:SHORT], max_new_tokens=TOKENS, logprobs=True)
        assert servers.kv_offload()["cpu_pages"] == 0
        servers.generate(prompts[SHORT:] * 2, max_new_tokens=TOKENS)
        state = servers.kv_offload()
    assert_same_tokens(expected, actual, logprob_atol=LOGPROB_ATOL)
    assert state["verify_checks"] == LAYERS * state["steps"] and state["cpu_pages"] > 0
    assert 0 < state["verify_max_rel_error"] <= 1e-5
