"""Quantised weights on real servers, by a quantisation that runs on every CPU."""

import json
import os

import pytest

from harness import PDCluster, ServerFailed, assert_same_tokens, random_prompts, stock_answers
from servers.pd_cluster import flags
from servers.single_server import SingleServer

LENGTHS = (1, 31, 33, 64, 257, 415, 512, 700)
BUDGET_TOKENS, SHORT = 320, 5  # so many of the lengths, with what is decoded, fit the budget
LAYERS, TOKENS = 4, 40
LOGPROB_ATOL = 1e-3  # as in test_identity


@pytest.fixture(scope="module")
def quantisation(tmp_path_factory):
    """(function from model and fields to a quantised checkpoint, environment of servers)."""
    pytest.importorskip("sglang")
    import quantised_linear

    path = quantised_linear.install(tmp_path_factory.mktemp("plugin"))
    path = ":".join(filter(None, (path, os.environ.get("PYTHONPATH"))))

    def checkpoint(model, **config):
        folder = tmp_path_factory.mktemp("model") / "quantised"
        return quantised_linear.quantised(model, folder, **config)

    return checkpoint, {"PYTHONPATH": path}


@pytest.mark.slow  # predictions through a quantised projection: test/plugin/test_support.py
def test_tokens_equal_stock_and_small_budgets_keep_to_their_pages(
    quantisation, tiny_model, tmp_path
):
    """Requests that fit the budget, then longer ones, whose queries are predicted through the projection."""
    checkpoint, env = quantisation
    model, prompts = checkpoint(tiny_model("qwen3")), random_prompts(LENGTHS, seed=7)
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


@pytest.mark.slow
def test_a_checkpoint_that_sets_the_dtype_of_kv_is_refused(quantisation, tiny_model, tmp_path):
    checkpoint, env = quantisation
    model = checkpoint(tiny_model("qwen3"), kv_cache_quant_algo="FP8")
    arguments = flags(disaggregation_mode="decode", kv_offload="scout")
    log = tmp_path / "log"
    with (
        pytest.raises(ServerFailed, match="sets KV to torch.float8_e4m3fn"),
        SingleServer("decode", model, arguments, device="cpu", log=log, environment=env),
    ):
        pass
