"""Samples as requests: what is sent to a server, and how its answer is scored.

The first token after a prompt comes from the prefill server, which always uses full attention; for
`count` that is the whole answer. The prompt therefore ends before the question. A grammar forces the tokens of the
question, so that the decode server processes it, with the policy under test, and then leaves the answer free. This
needs servers with ``--grammar-backend llguidance``, whose grammars may contain token ids. A sample without
``question_tokens`` has the question in the prompt, as a user's request has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.accuracy import planted, tasks, vocabulary

ANSWER_TOKENS = 24  # the longest correct answer to a task has 17
ANY_TOKEN = f"<[{len(vocabulary.SPECIAL_TOKENS)}-{vocabulary.ID_OF[vocabulary.WORDS[-1]]}]>"
FIRST_WORD, LAST_WORD = 17, 49151  # token ids of SmolLM2 that are not special

FORCING_FLAGS = ("--grammar-backend", "llguidance")
# Avoids compiling the mask kernel on first use.
FORCING_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Source:
    """Where questions come from, and the model that can answer them.

    ``sample``: from task, length and seed. ``first_seed``: of the suite; ``model``: its folder, created if needed.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    sample: Callable[[str, int, int], tasks.Sample]
    first_seed: int
    model: Callable[[], Path]
    dtype: str


def planted_sample(task: str, length_tokens: int, index: int) -> tasks.Sample:
    """A question about document ``index`` of planted.py; `joined`: several facts, or a chain of them."""
    document = _planted_document(index)
    mine = [q for q in document.questions if q.cut == length_tokens]
    (question,) = [q for q in mine if (q.kind == "single") == (task == "single")]
    last = question.numbers[-1][1]
    prompt = document.tokens[:length_tokens] + question.ask
    blanks = tuple(question.numbers)
    return tasks.Sample(task, prompt, question.answer[:last], len(question.ask), blanks)


@functools.cache
def _planted_document(index: int) -> planted.Document:
    ((_, document),) = planted.real_documents(_smollm2(), [index])
    return document


def _smollm2() -> Path:
    from smollm2 import smollm2

    return smollm2()


SOURCES = {
    "tasks": Source(
        tasks.TASKS,
        (1024, 2048, 4096, 8192, 16384),
        functools.lru_cache(maxsize=256)(tasks.make_sample),
        40_000_000,  # far from the seeds of training and of the model card
        lambda: Path(__file__).resolve().parent / "recall_model",
        "bfloat16",
    ),
    "planted": Source(("single", "joined"), planted.CUTS, planted_sample, 0, _smollm2, "float32"),
}


def forcing_grammar(forced: Sequence[int], then: str = "") -> str:
    """Exactly these token ids, followed by what the rule ``then`` allows."""
    return f"start: {' '.join(f'<[{token}]>' for token in forced)} {then}"


def payload(sample: tasks.Sample) -> dict[str, Any]:
    """Body of a ``/generate`` request, greedy, up to the first ``;`` or to the last blank."""
    at = len(sample.prompt) - sample.question_tokens
    question = sample.prompt[at:]
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": len(question) + ANSWER_TOKENS}
    if sample.blanks is not None:
        free = {place for begin, end in sample.blanks for place in range(begin, end)}
        words = ["any" if i in free else f"<[{x}]>" for i, x in enumerate(sample.answer)]
        grammar = forcing_grammar(question, f"{' '.join(words)}\nany: <[{FIRST_WORD}-{LAST_WORD}]>")
        sampling |= {"max_new_tokens": len(question) + len(words), "ebnf": grammar}
    else:
        sampling["stop_token_ids"] = [vocabulary.END]
        sampling["ebnf"] = forcing_grammar(question, f"any*\nany: {ANY_TOKEN}")
    return {"input_ids": sample.prompt[:at], "sampling_params": sampling}


def is_right(sample: tasks.Sample, answer: dict[str, Any]) -> bool:
    """Exact match of a server's answer.

    Raises ValueError for an aborted request, and where the question was not forced.
    """
    reason = answer["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ValueError(f"the server ended a request: {reason.get('message', reason)}")
    given = list(answer.get("output_ids") or [])
    question = sample.prompt[len(sample.prompt) - sample.question_tokens :]
    asked, given = given[: len(question)], given[len(question) :]
    if asked != question:
        raise ValueError(f"the question was not forced: {asked}; {question} was sent")
    if sample.blanks is not None:
        return given[: len(sample.answer)] == sample.answer
    if reason.get("matched") == vocabulary.END and vocabulary.END not in given:
        given.append(vocabulary.END)
    return tasks.is_correct(sample.task, sample.answer, given)
