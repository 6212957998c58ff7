"""With a budget that covers the context, in fp32, greedy tokens equal stock SGLang's prefill-decode pair.

Lengths are ragged, on and beside page borders; batches run from 1 to 16 requests.
"""

import pytest

from harness import PDCluster, assert_same_tokens, random_prompts, wait_until

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 257, 300, 415, 511, 512, 513, 700)
NEW_TOKENS = 40  # crosses a page border for every prompt
BUDGET_TOKENS = 1024
LOGPROB_ATOL = 1e-3
"""Two fp32 implementations of attention, each summing in its own order, through four layers."""

SCOUT = ("--kv-offload", "scout", "--kv-offload-budget", str(BUDGET_TOKENS))
RADIX = "--disaggregation-decode-enable-radix-cache"
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "glm4")
WITH_RADIX = ("qwen3", "glm4")


def cluster(model, *, scout, decode_args=()):
    return PDCluster(
        model,
        server_args=SCOUT if scout else (),
        decode_args=decode_args,
        max_running_requests=16,
        max_total_tokens=32768,
    )


@pytest.fixture(scope="module")
def stock(tiny_model):
    """Answers of the stock pair, per architecture; computed once."""
    known = {}

    def answers(arch):
        if arch not in known:
            with cluster(tiny_model(arch), scout=False) as servers:
                known[arch] = servers.generate(
                    random_prompts(LENGTHS, seed=7), max_new_tokens=NEW_TOKENS, logprobs=True
                )
            # A model that repeats one token would agree with anything.
            assert min(len(set(a.output_ids)) for a in known[arch]) >= 5
        return known[arch]

    return answers


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_equal_stock(arch, stock, tiny_model):
    prompts = random_prompts(LENGTHS, seed=7)
    expected = stock(arch)
    with cluster(tiny_model(arch), scout=True) as servers:
        together = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, together, logprob_atol=LOGPROB_ATOL)
        alone = servers.generate(
            prompts[-4:], max_new_tokens=NEW_TOKENS, logprobs=True, concurrency=1
        )
        assert_same_tokens(expected[-4:], alone, logprob_atol=LOGPROB_ATOL)
        state = servers.kv_offload()
        assert state["steps"] > NEW_TOKENS and state["selected_pages"] > 0
        assert state["cpu_pages"] == 0, "everything fits: nothing is left to the CPU"
        assert state["digests_received"] > 0 and state["host_pages_used"] == 0
        # Starved for a second on a busy machine it is replaced, which costs no request.
        wait_until("a worker", lambda: servers.kv_offload()["worker"]["state"] == "ready", 60)


@pytest.mark.parametrize("arch", WITH_RADIX)
def test_tokens_equal_stock_with_the_decode_radix_cache(arch, stock, tiny_model):
    prompts = random_prompts(LENGTHS, seed=7)
    expected = stock(arch)
    with cluster(tiny_model(arch), scout=True, decode_args=[RADIX]) as servers:
        first = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, first, logprob_atol=LOGPROB_ATOL)
        computed = servers.kv_offload()["digests_computed"]
        received = servers.kv_offload()["digests_received"]

        again = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, again, logprob_atol=LOGPROB_ATOL)
        assert sum(a.cached_tokens for a in again) > 1000, (
            "the second round must hit the prefix cache"
        )
        state = servers.kv_offload()
        assert state["digests_received"] - received < received / 4, "cached pages have digests"
        assert state["digests_computed"] - computed <= 2 * len(prompts)

        used = state["host_pages_used"]
        assert used > 0, "the radix cache holds pages"
        servers.flush()
        assert servers.kv_offload()["host_pages_used"] == 0
        after = servers.generate(prompts, max_new_tokens=NEW_TOKENS, logprobs=True)
        assert_same_tokens(expected, after, logprob_atol=LOGPROB_ATOL)
