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


ENDING = SimpleNamespace(gracefully_exit=True)


@pytest.mark.parametrize(("ids", "wrong"), [([5, -1], -1), ([100, -1], 100)])
def test_ids_outside_the_vocabulary_are_named(ids, wrong):
    with pytest.raises(ValueError, match=f"contains {wrong}, .* ids are 0 to 99"):
        before_validate_one_request(MANAGER, request(), ids)


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        before_validate_one_request(MANAGER, request(), [])


@pytest.mark.parametrize("ids", [None, [0, 99]])
def test_what_is_inside_goes_on(ids):
    assert before_validate_one_request(MANAGER, request(), ids) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 2.5), ("max_new_tokens", "4"), ("top_k", [1]), ("stop", 5), ("min_p", {})],
)
def test_a_sampling_parameter_of_a_wrong_type_is_named(name, value):
    with pytest.raises(ValueError, match=rf"sampling_params: Expected .* at `\$\.{name}`"):
        before_validate_one_request(MANAGER, request(**{name: value, "top_p": None}), [5])


@pytest.mark.parametrize(("name", "bits"), [("top_k", 32), ("sampling_seed", 64)])
def test_a_number_of_too_many_bits_is_refused(name, bits):
    with pytest.raises(ValueError, match=f"{name} is .* from -{2 ** (bits - 1)} to"):
        before_validate_one_request(MANAGER, request(**{name: 2 ** (bits - 1)}), [5])


def test_more_logprobs_than_there_is_room_for_are_refused():
    before_validate_one_request(MANAGER, request({"top_logprobs_num": 128}), [5])
    with pytest.raises(ValueError, match="top_logprobs_num is 129; .* from 0 to 128"):
        before_validate_one_request(MANAGER, request({"top_logprobs_num": 129}), [5])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprob_start_len", -5),
        ("logprob_start_len", [0]),
        ("return_logprob", 3),
        ("token_ids_logprob", [100]),
        ("priority", 2**31),
        ("rid", ["a", "b"]),
        ("rid", "\ud800"),
        ("extra_key", "\ud800"),
        ("bootstrap_host", "a/b?c"),
        ("bootstrap_host", ["127.0.0.1"]),
        ("bootstrap_port", 0),
        ("bootstrap_port", "8998"),
        ("bootstrap_room", -1),
        ("bootstrap_room", 2**63),
        ("bootstrap_room", 5.0),
        ("bootstrap_room", None),
        ("bootstrap_host", None),
    ],
)
def test_a_field_of_a_wrong_type_or_range_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        before_validate_one_request(MANAGER, request(PLACE | {field: value}), [5])


def test_a_request_without_a_place_or_with_the_flag_s_port_goes_on():
    for place in ({}, PLACE, PLACE | {"bootstrap_port": None}, PLACE | {"bootstrap_host": "::1"}):
        assert before_validate_one_request(MANAGER, request(place), [5]) is None


def test_numbers_of_either_kind_and_null_are_temperatures():
    for value in (0, 0.5, None):
        some = request(temperature=value, max_new_tokens=4)
        assert before_validate_one_request(MANAGER, some, [5]) is None


def test_what_comes_after_sigterm_is_refused_with_a_status_that_a_router_sends_again():
    with pytest.raises(HTTPException, match="shutting down") as refusal:
        before_validate_one_request(ENDING, GenerateReqInput(stream=False), [5])
    assert refusal.value.status_code == 503
    with pytest.raises(ValueError, match="shutting down"):  # its status has been sent
        before_validate_one_request(ENDING, GenerateReqInput(stream=True), [5])


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
