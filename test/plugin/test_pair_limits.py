"""Requests that a pair cannot answer as one server would; on real servers: test/e2e/test_answers.py."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import pytest

pytest.importorskip("sglang.srt.plugins", reason="needs SGLang")
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402

from sglang_scout.plugin.http import LIMITS, before_normalize  # noqa: E402

PROMPT_LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}
BEYOND = [
    ("n", {"sampling_params": {"n": 2}}),
    ("n", {"sampling_params": [{}, {"n": 10**9}]}),
    ("n", {"sampling_params": {"n": "3"}}),
    ("logprob_start_len", PROMPT_LOGPROBS | {"stream": True}),
    ("logprob_start_len", PROMPT_LOGPROBS | {"top_logprobs_num": 1}),
    ("logprob_start_len", PROMPT_LOGPROBS | {"input_ids": [[5], [6]]}),
    ("logprob_start_len", PROMPT_LOGPROBS | {"input_ids": None, "text": ["a"]}),
    ("logprob_start_len", {"return_logprob": [True], "logprob_start_len": [3], "stream": True}),
    ("token_ids_logprob", {"return_logprob": True, "token_ids_logprob": [0]}),
    ("token_ids_logprob", {"return_logprob": [True], "token_ids_logprob": [[0]]}),
    ("max_new_tokens", {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}}),
    ("return_hidden_states", {"return_hidden_states": True}),
    ("return_hidden_states", {"return_hidden_states": [False, True]}),
    ("return_routed_experts", {"return_routed_experts": True}),
    ("return_indexer_topk", {"return_indexer_topk": True}),
    ("input_embeds", {"input_ids": None, "input_embeds": [[0.5]]}),
    ("positional_embed_overrides", {"positional_embed_overrides": {}}),
    ("session_params", {"session_params": {"id": "a"}}),
]


@pytest.mark.parametrize(("field", "given"), BEYOND)
def test_what_a_pair_cannot_do_is_refused_by_name(field, given):
    with pytest.raises(ValueError, match=f"^{field}: "):
        before_normalize(GenerateReqInput(**{"input_ids": [5]} | given))


def test_every_limit_is_tested():
    assert {field for field, _ in BEYOND} == set(LIMITS)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sampling_params": [{"n": 1}, {}]},
        {"sampling_params": {"max_new_tokens": 0}},
        {"sampling_params": "x", "logprob_start_len": "x"},  # refused by their types
        PROMPT_LOGPROBS | {"top_logprobs_num": 0},
        PROMPT_LOGPROBS | {"logprob_start_len": -1, "stream": True, "top_logprobs_num": 5},
        PROMPT_LOGPROBS | {"return_logprob": False, "token_ids_logprob": [5], "stream": True},
    ],
)
def test_what_a_pair_can_do_goes_on(given):
    before_normalize(GenerateReqInput(**{"input_ids": [5]} | given))
