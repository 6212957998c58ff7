"""The hook functions of the HTTP process; see ``hooks.py`` for targets and reasons."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_scout.plugin.shutdown import refuse_new

MAX_TOP_LOGPROBS = 128
"""Capacity of SGLang's ``MetadataBuffers``."""


@functools.cache
def _types_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct with the fields of ``kind`` by name, as ``kind`` may be an array on the wire."""
    fields = [(field.name, field.type, None) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(kind.__name__, fields)


def before_normalize(request: GenerateReqInput) -> None:
    """SGLang would make ``n`` requests, for any n, with one bootstrap room for all."""
    given = request.sampling_params or {}
    for sampling in given if isinstance(given, list) else [given]:
        if sampling.get("n") not in (None, 1):
            raise ValueError(
                f"n is {sampling['n']}: a pair of servers gives one answer to a request; send it again for another"
            )


def before_validate_one_request(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """SGLang answers a ValueError with status 400. Its own checks do not cover the types of sampling parameters."""
    if not isinstance(obj, GenerateReqInput):
        return  # SGLang refuses it itself
    refuse_new(manager, obj)
    given = {name: value for name, value in obj.sampling_params.items() if value is not None}
    try:
        sampling = msgspec.convert(given, _types_of(manager.sampling_params_class))
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from None
    for name, bits in (("top_k", 32), ("sampling_seed", 64)):
        value = getattr(sampling, name)
        if value is not None and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise ValueError(f"{name} must be an integer of {bits} bits, got {value}.")
    if obj.session_params:
        raise ValueError("session_params: a pair of servers has no sessions; send the whole prompt")
    if obj.top_logprobs_num > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_logprobs_num is {obj.top_logprobs_num}; at most {MAX_TOP_LOGPROBS} go from server to server"
        )
    if input_ids is not None and not len(input_ids):
        raise ValueError("the prompt has no tokens; send one at least")
    size = manager.model_config.vocab_size
    wrong = [token for token in input_ids or () if not 0 <= token < size]
    if wrong:
        raise ValueError(
            f"input_ids holds {wrong[0]}, which is outside the model's vocabulary: ids are 0 to {size - 1}"
        )
