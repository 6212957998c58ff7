"""Requests that the process of the HTTP port refuses; on real servers: test/e2e/test_bad_input.py."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.plugins", reason="needs SGLang")
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from sglang_scout.plugin.http_hooks import before_validate_one_request  # noqa: E402

MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=100),
    sampling_params_class=SamplingParams,
)
REQUEST = SimpleNamespace(sampling_params={})


@pytest.mark.parametrize(("ids", "wrong"), [([5, -1], -1), ([100, -1], 100)])
def test_ids_outside_the_vocabulary_are_named(ids, wrong):
    with pytest.raises(ValueError, match=f"holds {wrong}, .* ids are 0 to 99"):
        before_validate_one_request(MANAGER, REQUEST, ids)


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        before_validate_one_request(MANAGER, REQUEST, [])


@pytest.mark.parametrize("ids", [None, [0, 99]])
def test_what_is_inside_goes_on(ids):
    assert before_validate_one_request(MANAGER, REQUEST, ids) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 2.5), ("max_new_tokens", "4"), ("top_k", [1]), ("stop", 5), ("n", {})],
)
def test_a_sampling_parameter_of_a_wrong_type_is_named(name, value):
    with pytest.raises(ValueError, match=rf"sampling_params: Expected .* at `\$\.{name}`"):
        before_validate_one_request(
            MANAGER, SimpleNamespace(sampling_params={name: value, "top_p": None}), [5]
        )


def test_numbers_of_either_kind_and_null_are_temperatures():
    for value in (0, 0.5, None):
        request = SimpleNamespace(sampling_params={"temperature": value, "max_new_tokens": 4})
        assert before_validate_one_request(MANAGER, request, [5]) is None
