"""Samples as requests: what is sent to a server, and what its answer is worth.

The first token after a prompt comes from the prefill server, which always attends to everything; for
`count` that is the whole answer. With ``through="decode"`` the prompt therefore ends before the
question. A grammar forces the tokens of the question, so that the decode server reads it, with the
policy that is measured, and then leaves the answer free. That takes servers with
``--grammar-backend llguidance``, whose grammars may name token ids; with ``through="prompt"`` any
server will do, and the scores of sparse policies come out higher than they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tasks

FIRST_SEED = 40_000_000  # far from the seeds of training and of the model card
QUESTION_TOKENS = 4  # of every question that make_sample asks
ANSWER_TOKENS = 24  # the longest right answer has 17
ANY_TOKEN = f"<[{len(tasks.SPECIAL_TOKENS)}-{tasks.ID_OF[tasks.WORDS[-1]]}]>"

FORCING_FLAGS = ("--grammar-backend", "llguidance")
FORCING_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1"
}  # the masks' kernel would be compiled at first use


@functools.lru_cache(maxsize=256)
def sample_of(task: str, length_tokens: int, index: int, first_seed: int) -> tasks.Sample:
    return tasks.make_sample(task, length_tokens, first_seed + index)


def forcing_grammar(forced: Sequence[int], then: str = "") -> str:
    """Exactly these token ids, and after them what the rule ``then`` allows."""
    return f"start: {' '.join(f'<[{token}]>' for token in forced)} {then}"


def payload(sample: tasks.Sample, through: str) -> dict[str, Any]:
    """Body of a ``/generate`` request, greedy, up to the first ``;``."""
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": ANSWER_TOKENS,
        "stop_token_ids": [tasks.END],
    }
    if through == "text":
        return {"text": sample.prompt_text, "sampling_params": sampling}
    prompt = sample.prompt
    if through == "decode":
        prompt, question = prompt[:-QUESTION_TOKENS], prompt[-QUESTION_TOKENS:]
        sampling["max_new_tokens"] += QUESTION_TOKENS
        sampling["ebnf"] = forcing_grammar(question, f"any*\nany: {ANY_TOKEN}")
    return {"input_ids": prompt, "sampling_params": sampling}


def is_right(sample: tasks.Sample, answer: dict[str, Any], through: str) -> bool:
    """Exact match of a server's answer.

    Raises ValueError for an aborted request, and where the question was not forced.
    """
    meta = answer["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        hint = ""
        if through == "decode":
            hint = "; is it a server with --grammar-backend llguidance? Otherwise --through prompt"
        raise ValueError(f"the server ended a request: {reason.get('message', reason)}{hint}")
    given = list(answer.get("output_ids") or [])
    if through == "text":
        words = answer["text"].split()
        given = [tasks.ID_OF.get(word, -1) for word in words]
    elif through == "decode":
        asked, given = given[:QUESTION_TOKENS], given[QUESTION_TOKENS:]
        if asked != sample.prompt[-QUESTION_TOKENS:]:
            raise ValueError(f"the question was not forced: {asked}; {sample.prompt[-4:]} was sent")
    if reason.get("matched") == tasks.END and tasks.END not in given:
        given.append(tasks.END)
    return tasks.is_correct(sample.task, sample.answer, given)
