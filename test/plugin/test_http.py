"""Requests that the HTTP process refuses; on real servers: test/e2e/test_bad_requests.py, test_process_faults.py."""

from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_scout.plugin.http import LIMITS, before_normalize, before_validate_one_request

MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=100),
    gracefully_exit=False,
    sampling_params_class=SamplingParams,
    server_args=SimpleNamespace(disaggregation_mode="prefill"),
    rid_to_state={},
    event_loop=SimpleNamespace(call_later=lambda *args: None),
)
PLACE = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}


def request(fields=None, **sampling):
    made = GenerateReqInput(input_ids=[5], sampling_params=sampling, **(fields or {}))
    made.normalize_batch_and_arguments()
    return made


IN_SAMPLING = {
    "max_new_tokens": (2.5, "4"),
    "top_k": ([1], 2**31),
    "stop": (5,),
    "min_p": ({},),
    "sampling_seed": (2**63,),
}
IN_REQUEST = {
    "logprob_start_len": (-5, [0]),
    "return_logprob": (3,),
    "top_logprobs_num": (129,),
    "token_ids_logprob": ([100],),
    "priority": (2**31,),
    "rid": (["a", "b"], "\ud800"),
    "extra_key": ("\ud800",),
    "bootstrap_host": ("a/b?c", ["127.0.0.1"], None),
    "bootstrap_port": (0, "8998"),
    "bootstrap_room": (-1, 2**63, 5.0, None),
}
REFUSED = [
    ({}, {}, [5, -1], "input_ids contains -1, .* ids are 0 to 99"),
    ({}, {}, [100, -1], "input_ids contains 100, "),
    ({}, {}, [], "prompt is empty"),
    *(({}, {name: x}, [5], name) for name, values in IN_SAMPLING.items() for x in values),
    *((PLACE | {name: x}, {}, [5], name) for name, values in IN_REQUEST.items() for x in values),
]


@pytest.mark.parametrize(("fields", "sampling", "ids", "message"), REFUSED)
def test_what_is_of_a_wrong_type_or_range_is_named(fields, sampling, ids, message):
    with pytest.raises(ValueError, match=message):
        before_validate_one_request(MANAGER, request(fields, top_p=None, **sampling), ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs_num": 128},
        PLACE,
        PLACE | {"bootstrap_port": None},  # it is the flag's
        PLACE | {"bootstrap_host": "::1"},
    ],
)
def test_other_requests_go_on(fields):
    for ids in (None, [0, 99]):
        given = request(fields, temperature=None, max_new_tokens=4)
        before_validate_one_request(MANAGER, given, ids)


def test_what_comes_after_sigterm_is_refused_with_a_status_that_a_router_sends_again():
    ending = SimpleNamespace(gracefully_exit=True)
    with pytest.raises(HTTPException, match="shutting down") as refusal:
        before_validate_one_request(ending, GenerateReqInput(stream=False), [5])
    assert refusal.value.status_code == 503
    with pytest.raises(ValueError, match="shutting down"):  # its status has been sent
        before_validate_one_request(ending, GenerateReqInput(stream=True), [5])


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
    ("return_hidden_states", {"return_hidden_states": [False, True]}),
    *((f"return_{x}", {f"return_{x}": True}) for x in ("routed_experts", "indexer_topk")),
    ("input_embeds", {"input_ids": None, "input_embeds": [[0.5]]}),
    ("positional_embed_overrides", {"positional_embed_overrides": {}}),
    ("session_params", {"session_params": {"id": "a"}}),
]


def test_what_a_pair_cannot_do_is_refused_by_name():
    for field, given in BEYOND:
        with pytest.raises(ValueError, match=f"^{field}: "):
            before_normalize(GenerateReqInput(**{"input_ids": [5]} | given))
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
