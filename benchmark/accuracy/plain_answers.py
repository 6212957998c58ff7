"""Answers of full attention by the study's plain PyTorch model: the gate's baseline, without a server."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from benchmark.accuracy import tasks
from benchmark.accuracy.questions import FIRST_WORD, LAST_WORD
from benchmark.accuracy.study.decode import Text, decode_window
from benchmark.accuracy.study.model import Model
from benchmark.accuracy.study.selection import Setting

FULL = Setting()


class PlainAnswers:
    """Samples of questions.py, answered greedily by the model in a folder."""

    def __init__(self, model_path: str | Path) -> None:
        self._model = Model(model_path)
        self._context: list[int] = []
        self._text: Text | None = None

    @torch.no_grad()
    def is_right(self, sample: tasks.Sample) -> bool:
        """Like questions.is_right for a server's answer. Samples about one text should be consecutive."""
        start = len(sample.prompt) - sample.question_tokens
        start -= start % FULL.page_tokens
        context, question = sample.prompt[:start], sample.prompt[start:]
        if self._text is None or self._context != context:
            self._context, self._text = context, Text(self._model, torch.tensor(context))
        return any(
            self._follows(question, answer, sample.blanks) for answer in right_answers(sample)
        )

    def _follows(
        self, question: list[int], answer: list[int], blanks: tuple[tuple[int, int], ...] | None
    ) -> bool:
        """Whether greedy decoding gives this answer: teacher-forced, each token is the most likely one."""
        assert self._text is not None
        tokens = torch.tensor(question + answer)
        start = len(self._context)
        found = decode_window(self._model, self._text, start, tokens[:-1], FULL).log_probs
        found, free = found[len(question) - 1 :], list(range(len(answer)))
        if blanks is not None:  # where only words are allowed
            free = [i for begin, end in blanks for i in range(begin, end)]
            found = found[:, : LAST_WORD + 1].index_fill(1, torch.arange(FIRST_WORD), -torch.inf)
        return bool((found.argmax(-1)[free] == tokens[len(question) :][free]).all())


def right_answers(sample: tasks.Sample) -> list[list[int]]:
    """The correct answer, or for multi_value one for each order of the values."""
    answer = list(sample.answer)
    if sample.task != "multi_value":
        return [answer]
    orders = []
    for values in itertools.permutations(answer[::2]):
        orders.append(list(answer))
        orders[-1][::2] = values
    return orders
