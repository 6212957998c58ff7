"""The other papers' systems on real servers, each a decode server of one prefill server; with either transport.

Requests that fit the budget get stock SGLang's tokens; for longer ones every layer of every step agrees with a plain
reference over exactly the pages that it should attend to.
"""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import PDCluster, assert_same_tokens, random_prompts, stock_answers, wait_for_steps
from page_weights import forecast_weights, identity, pilot_weights
from servers.group import flags
from sglang_scout.core.forecast import save_weights
from sglang_scout.core.profile import config_digest

pytestmark = pytest.mark.slow  # five servers, twice
SHORT, LONG = (1, 31, 33, 64, 100, 257), (900, 640, 1500, 37)
NEW_TOKENS, BUDGET_TOKENS = 30, 320
POLICIES = {
    "infinigen": {},
    "sparda": {"forecast_file": "forecast"},
    "rheo": {"pilot_file": "pilot"},
    "hgca": {},
    "scout": {},
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Files of random weights for the model, by kind."""
    raw, folder = json.loads((model / "config.json").read_text()), tmp_path_factory.mktemp("w")
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    of_model = identity(
        *map(raw.get, sizes), architecture=raw["architectures"][0], digest=config_digest(raw)
    )
    made = {
        "forecast": forecast_weights(of_model, raw["hidden_size"]),
        "pilot": pilot_weights(of_model, rank=32),
    }
    for kind, weights in made.items():
        save_weights(weights, str(folder / f"{kind}.npz"))
    return {kind: str(folder / f"{kind}.npz") for kind in made}


@pytest.fixture(scope="module")
def stock(model):
    return stock_answers(model, random_prompts(SHORT, seed=7), max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module", params=["host", "graph"])
def servers(request, stock, model, trained):
    """They start when ``stock`` has its answers."""

    def arguments(policy):
        keys = {key: trained.get(x, x) for key, x in POLICIES[policy].items()}
        config = {"verify": True, "resident_tokens": 32, "transport": request.param, **keys}
        more = {"kv_offload_budget": BUDGET_TOKENS, "kv_offload_config": json.dumps(config)}
        return flags(kv_offload=policy, **more)

    first, *others = POLICIES
    with PDCluster(
        model,
        {
            "prefill": flags(kv_offload="scout"),
            "decode": arguments(first),
            **{policy: arguments(policy) for policy in others},
        },
        server_args=flags(max_running_requests=6, max_total_tokens=16384),
        router_args=None,
        env={"TRITON_INTERPRET": "1"} if request.param == "graph" else {},
    ) as made:
        yield made


def server_of(policy):
    return "decode" if policy == next(iter(POLICIES)) else policy


@pytest.mark.parametrize("policy", POLICIES)
def test_short_requests_get_stock_s_tokens(stock, servers, policy):
    prompts = random_prompts(SHORT, seed=7)
    found = servers.generate(prompts, server_of(policy), max_new_tokens=NEW_TOKENS, logprobs=True)
    assert_same_tokens(stock, found, logprob_atol=1e-3)
    received = servers.kv_offload(server_of(policy))["digests_received"]
    assert (received > 0) == (policy == "scout"), "the others have other digests"


@pytest.mark.parametrize("policy", POLICIES)
def test_long_requests_attend_to_exactly_their_pages(request, servers, policy):
    which, prompts = server_of(policy), random_prompts(LONG, seed=3)
    servers.generate(prompts, which, max_new_tokens=NEW_TOKENS)
    state = servers.kv_offload(which)
    assert state["policy"] == policy and state["verify_checks"] == 4 * state["steps"]
    assert state["transport"] == request.node.callspec.params["servers"]
    assert 0 < state["verify_max_rel_error"] <= 1e-5
    assert (state["context_pages_capacity"] > 0) == (policy == "hgca")
    fetches = policy in ("infinigen", "sparda")
    assert (state["fetched_pages"] > 0, state["cpu_pages"] > 0) == (fetches, not fetches)
    if fetches:
        return
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(servers.generate, prompts, which, max_new_tokens=NEW_TOKENS)
        wait_for_steps(servers, 2, which)
        os.kill(servers.kv_offload(which)["worker"]["pid"], signal.SIGKILL)
        assert [len(a.output_ids) for a in answers.result()] == [NEW_TOKENS] * len(LONG)
    state = servers.kv_offload(which)
    assert state["fallback_pages"] > 0 and state["verify_max_rel_error"] <= 1e-5
