"""What a client may ask of one server but not of a pair; both servers refuse it by name.

The prefill server computes the prompt and the first token, and the decode server all others; the client gets the answer
of the decode server. What only the prefill server knows is missing there, and SGLang says nothing. Its router adds the
log-probabilities of the prompt's tokens to an answer of ``/generate``, to one prompt's and not to a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import GenerateReqInput


class Limit(NamedTuple):
    """``asked`` is called before SGLang's normalization: fields may be lists, and of any type."""

    field: str
    asked: Callable[[GenerateReqInput], bool]
    sentence: str


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sampling(request: GenerateReqInput, name: str) -> Iterable[Any]:
    """The values of a sampling parameter, one per given dictionary."""
    return (one.get(name) for one in _each(request.sampling_params) if isinstance(one, dict))


def _asks(name: str) -> Callable[[GenerateReqInput], bool]:
    """Not every release has every field."""
    return lambda request: any(_each(getattr(request, name, None)))


def _logprob(request: GenerateReqInput) -> bool:
    return any(_each(request.return_logprob))


def _prompt_logprobs(request: GenerateReqInput) -> bool:
    starts = _each(request.logprob_start_len)
    if not (_logprob(request) and any(isinstance(at, int) and at >= 0 for at in starts)):
        return False
    batch = isinstance(request.text, list) or any(
        isinstance(ids, list) for ids in _each(request.input_ids)
    )
    return bool(request.stream) or batch or any(_each(request.top_logprobs_num))


LIMITS = (
    Limit(
        "n",
        lambda request: any(n not in (None, 1) for n in _sampling(request, "n")),
        "a prefill-decode pair gives one answer per request; send the request again for another",
    ),
    Limit(
        "logprob_start_len",
        _prompt_logprobs,
        "a prefill-decode pair returns log-probabilities of the prompt (in OpenAI's API: echo with logprobs) only from "
        "/generate, for one prompt, without stream and top_logprobs_num",
    ),
    Limit(
        "token_ids_logprob",
        lambda request: (
            _logprob(request) and any(a is not None for a in _each(request.token_ids_logprob))
        ),
        "a prefill-decode pair has none for the first token; use top_logprobs_num",
    ),
    Limit(
        "max_new_tokens",
        lambda request: _logprob(request) and 0 in _sampling(request, "max_new_tokens"),
        "must be at least 1 with return_logprob: a prefill-decode pair always computes a token",
    ),
    Limit(
        "return_hidden_states",
        _asks("return_hidden_states"),
        "a prefill-decode pair has none for the prompt and the first token; drop the field",
    ),
    Limit(
        "return_routed_experts",
        _asks("return_routed_experts"),
        "a prefill-decode pair has none for the prompt; drop the field",
    ),
    Limit(
        "return_indexer_topk",
        _asks("return_indexer_topk"),
        "a prefill-decode pair has none for the prompt; drop the field",
    ),
    Limit(
        "input_embeds",
        _asks("input_embeds"),
        "not supported by a prefill-decode pair; send text or input_ids",
    ),
    Limit(
        "positional_embed_overrides",
        lambda request: getattr(request, "positional_embed_overrides", None) is not None,
        "not supported by a prefill-decode pair; send text or input_ids",
    ),
    Limit(
        "session_params",
        _asks("session_params"),
        "a prefill-decode pair has no sessions; send the whole prompt",
    ),
)


def refuse_beyond(request: GenerateReqInput) -> None:
    """Raises ValueError, which SGLang answers with status 400, for the first limit that the request exceeds."""
    for limit in LIMITS:
        if limit.asked(request):
            raise ValueError(f"{limit.field}: {limit.sentence}")
