"""The hooks of the HTTP process: a request is checked once, before anything is sent to a scheduler.

A field must have the type that SGLang declares for its message to the scheduler, where a wrong one ends the process.
SGLang answers a ValueError with status 400.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import HTTPException
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput

from sglang_scout.plugin.halves import halves, parts_of
from sglang_scout.plugin.hooks import hook
from sglang_scout.plugin.requests import REFUSAL, refuse

logger = logging.getLogger(__name__)

FLOAT32_MAX = 3.4028234e38
RANGES = {
    "bootstrap_port": (1, 2**16 - 1),
    "disagg_prefill_dp_rank": (0, 0),
    "logprob_start_len": (-1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "routed_dp_rank": (0, 0),
    "sampling_seed": (-(2**63), 2**63 - 1),
    "top_k": (-(2**31), 2**31 - 1),
    "top_logprobs_num": (0, 128),  # capacity of SGLang's MetadataBuffers
}
_MADE_HERE = {"input_ids", "mm_inputs", "sampling_params", "session_params"}
# For what SGLang answers with status 500.
_STATUSES = {
    "in KVPoll": HTTPStatus.SERVICE_UNAVAILABLE,  # timed out
    "Grammar accept_token failed": HTTPStatus.BAD_REQUEST,  # it matches nothing
}
_OPENAI = "entrypoints.openai.serving"
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# What a client may ask of one server but not of a pair; both servers refuse it by name. The answer is the decode
# server's, which lacks what only the prefill server knows: the prompt's results and the first token's.
_NONE_FOR_PROMPT = "a prefill-decode pair has none for the prompt; drop the field"
_ONLY_TOKENS = "not supported by a prefill-decode pair; send text or input_ids"
LIMITS = {
    "n": "must be 1, as a prefill-decode pair gives one answer per request; send the request again for another",
    "logprob_start_len": "a prefill-decode pair returns log-probabilities of the prompt (in OpenAI's API: echo with "
    "logprobs) only from /generate, for one prompt, without stream and top_logprobs_num",
    "token_ids_logprob": "a prefill-decode pair has none for the first token; use top_logprobs_num",
    "max_new_tokens": "is 0; it must be at least 1 with return_logprob, as a prefill-decode pair computes a token",
    "return_hidden_states": "a prefill-decode pair has none for the prompt and the first token; drop the field",
    "return_routed_experts": _NONE_FOR_PROMPT,
    "return_indexer_topk": _NONE_FOR_PROMPT,
    "input_embeds": _ONLY_TOKENS,
    "positional_embed_overrides": _ONLY_TOKENS,
    "session_params": "a prefill-decode pair has no sessions; send the whole prompt",
}


@hook("managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", "before")
def before_normalize(request: GenerateReqInput) -> None:
    """Refuse what a pair cannot answer in full, for example `n` above 1."""
    # Before SGLang makes n requests of it, with one bootstrap room for all: fields may be lists, and of any type.
    asked = {x: _each(getattr(request, x, None)) for x in LIMITS}  # some not in every release
    sampling = [one for one in _each(request.sampling_params) if isinstance(one, dict)]
    asked["n"] = [one.get("n") not in (None, 1) for one in sampling]
    asked["positional_embed_overrides"] = [asked["positional_embed_overrides"] != [None]]
    logprob = any(_each(request.return_logprob))
    asked["max_new_tokens"] = [logprob and one.get("max_new_tokens") == 0 for one in sampling]
    ids, starts = asked["token_ids_logprob"], asked["logprob_start_len"]
    asked["token_ids_logprob"] = [logprob and of_prompt is not None for of_prompt in ids]
    from_prompt = any(logprob and isinstance(at, int) and at >= 0 for at in starts)
    # To other answers of /generate SGLang's router adds those of the prompt.
    several = any(isinstance(ids, list) for ids in (request.text, *_each(request.input_ids)))
    lacks = request.stream or several or any(_each(request.top_logprobs_num))
    asked["logprob_start_len"] = [from_prompt and lacks]
    for field, why in LIMITS.items():
        if any(asked[field]):
            raise ValueError(f"{field}: {why}")


@functools.cache
def _types_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct with the fields of ``kind`` by name, as ``kind`` may be an array on the wire."""
    fields = [(x.name, x.type, None) for x in msgspec.structs.fields(kind)]
    sent = [field for field in fields if field[0] not in _MADE_HERE]
    return msgspec.defstruct(kind.__name__, sent, forbid_unknown_fields=True)


def _check(values: dict[str, Any], kind: type[msgspec.Struct], what: str) -> None:
    given = {name: value for name, value in values.items() if value is not None}
    try:
        msgspec.convert(given, _types_of(kind))
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: {error}") from None
    for name, value in given.items():
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, UnicodeEncodeError) as error:
            raise ValueError(f"{what}: {name} cannot be sent: {error}") from None
    for name, (least, most) in RANGES.items():
        if name in given and not least <= given[name] <= most:
            raise ValueError(f"{name} is {given[name]}; it must be from {least} to {most}")


def _check_place(request: GenerateReqInput) -> None:
    """Where the two halves of a request meet: SGLang's router gives all three fields, and the port has a flag."""
    host, room = request.bootstrap_host, request.bootstrap_room
    if host == FAKE_BOOTSTRAP_HOST:
        return  # SGLang's health check
    if room is not None and not 1 <= room < 2**63:  # 0 is SGLang's for none
        raise ValueError(f"bootstrap_room is {room}; it must be from 1 to {2**63 - 1}")
    if (host is None) != (room is None) or (room is None and request.bootstrap_port is not None):
        raise ValueError(
            f"bootstrap_host is {host!r}, bootstrap_port {request.bootstrap_port} and bootstrap_room {room}; send all "
            "or none of them, as SGLang's router does"
        )
    if host is None or _HOST_NAME.fullmatch(host):
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"bootstrap_host is {host!r}; it must be a name or address") from None


@hook("managers.tokenizer_manager.TokenizerManager._validate_one_request", "before")
def before_validate_one_request(manager, obj, input_ids: list[int] | None) -> None:
    """Refuse requests whose fields would crash a scheduler, by type and range, and requests after SIGTERM."""
    if not isinstance(obj, GenerateReqInput):
        return  # SGLang refuses it itself
    if manager.gracefully_exit:
        refuse(obj, HTTPStatus.SERVICE_UNAVAILABLE, REFUSAL)
    if not isinstance(obj.sampling_params, dict):
        kind = type(obj.sampling_params).__name__
        raise ValueError(f"sampling_params is a {kind}; it must be one object for one prompt")
    _check(obj.sampling_params, manager.sampling_params_class, "sampling_params")
    if "\0" in (obj.sampling_params.get("regex") or ""):  # ends a scheduler with xgrammar 0.2.1
        raise ValueError("regex contains a NUL character; leave it out")
    for token, bias in (obj.sampling_params.get("logit_bias") or {}).items():
        if not abs(bias) <= FLOAT32_MAX:
            raise ValueError(f"logit_bias of token {token} is {bias}; the limit is 3.4e38")
    sent = _types_of(TokenizedGenerateReqInput).__struct_fields__
    values = {name: getattr(obj, name, None) for name in sent} | {"input_text": obj.text}
    _check(values, TokenizedGenerateReqInput, "request")
    _check_place(obj)
    halves.meet(manager, obj)
    if input_ids is not None and not len(input_ids):
        raise ValueError("the prompt is empty; send at least one token")
    size, sampling = manager.model_config.vocab_size, obj.sampling_params
    tokens = {"input_ids": input_ids, "token_ids_logprob": obj.token_ids_logprob}
    if sampling.get("min_new_tokens"):
        tokens["stop_token_ids with min_new_tokens"] = sampling.get("stop_token_ids")
    for name, ids in tokens.items():
        if wrong := [token for token in ids or () if not 0 <= token < size]:
            raise ValueError(
                f"{name} contains {wrong[0]}, which is outside the model's vocabulary: token ids are 0 to {size - 1}"
            )


@hook("managers.tokenizer_manager.TokenizerManager._create_tokenized_object", "after")
def after_create_tokenized_object(message, manager, obj, *args, **more):
    """Track which requests are on their way to a scheduler: the next thing that happens to this one."""
    obj.kv_offload_sent = True
    return message


@hook(f"{_OPENAI}_chat.OpenAIServingChat._convert_to_internal_request", "around")
@hook(f"{_OPENAI}_completions.OpenAIServingCompletion._convert_to_internal_request", "around")
def around_convert(original, *args, **more):
    """Answer with status 400 if converting an OpenAI request raises."""
    try:
        return original(*args, **more)
    except (ValueError, HTTPException):
        raise
    except Exception as error:
        raise _odd_field(error) from error


def _odd_field(error: Exception) -> ValueError:
    logger.info("--kv-offload: a request was refused", exc_info=error)
    return ValueError(f"a field has a wrong type or length ({type(error).__name__}: {error})")


@hook("managers.tokenizer_manager.TokenizerManager.generate_request", "around")
async def around_generate_request(original, manager, obj, request=None) -> AsyncIterator[Any]:
    """Answer with status 400 if a request raises before it is sent; tell the other server about failed requests."""
    try:
        async with aclosing(original(manager, obj, request)) as answers:
            async for answer in answers:
                for rid, reason in _errors(answer):
                    halves.tell(obj if obj.is_single else obj[obj.rid.index(rid)], *reason)
                yield answer
    except (ValueError, HTTPException) as error:
        message = getattr(error, "detail", str(error))
        given = getattr(error, "status_code", HTTPStatus.BAD_REQUEST)
        status = _status(given, message)
        if request is None or not await request.is_disconnected():
            halves.tell(obj, status, message)
        if status == given:
            raise
        raise HTTPException(status, message) from error
    except Exception as error:
        if any(hasattr(part, "kv_offload_sent") for part in (obj, *parts_of(obj))):
            raise
        refusal = _odd_field(error)
        halves.tell(obj, HTTPStatus.BAD_REQUEST, str(refusal))
        raise refusal from error


def _errors(answer: Any) -> Iterator[tuple[str, tuple[int, str]]]:
    """Request id, status and message of the errors in an answer to a stream or to several prompts."""
    for about in (one.get("meta_info", {}) for one in _each(answer)):
        reason = about.get("finish_reason") or {}
        if reason.get("type") == "abort" and reason.get("status_code"):
            reason["status_code"] = _status(reason["status_code"], reason["message"])
            yield about["id"], (reason["status_code"], reason["message"])


def _status(status: int, message: str) -> int:
    better = (known for part, known in _STATUSES.items() if part in message)
    return next(better, status) if status == HTTPStatus.INTERNAL_SERVER_ERROR else status
