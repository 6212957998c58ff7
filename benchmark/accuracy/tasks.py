"""Seeded synthetic tasks of long-context retrieval over a small vocabulary.

A text is a list of words, one token each, joined by single spaces. It begins with ``#``, goes on
with statements and filler sentences in random order, and ends with a question. Statements:

    amber river = 42 17 ;                      a fact: a key of two words and its value
    amber river = silver gate ;                a link: the value is another key
    amber river = kite 31 oak ... 77 ;         a span of 8 to 16 words
    amber river + ;                            one mark in the tally of a key

Questions and their answers (the answer is what follows the last ``=`` or ``:`` of the prompt):

    ? amber river =          42 17 ;                       recall, needle, multi_key
    all amber river :        42 , 17 , 63 ;                multi_value, in any order
    trace amber river =      silver gate = iron bell = 42 17 ;   variables
    copy amber river =       kite 31 oak ... 77 ;          copy
    count amber river :      5 ;                           count

The tasks differ in the distractors: `recall` has only facts, `needle` a few facts in filler,
`multi_key` facts whose keys share a word with the key asked for. Everything derives from a seed;
the same seed gives the same text on every machine. numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.accuracy.vocabulary import (
    ADJECTIVE0,
    ADJECTIVES,
    ALL,
    ASK,
    COLON,
    COMMA,
    COPY,
    COUNT,
    END,
    FILLER,
    IS,
    NOUN0,
    NOUNS,
    NUMBER0,
    START,
    TALLY,
    TRACE,
)

TASKS = ("recall", "needle", "multi_key", "multi_value", "variables", "copy", "count")
MIN_LENGTH_TOKENS = 96  # below this not every task fits
_KEYS = len(ADJECTIVES) * len(NOUNS)
MULTI_VALUES = 3  # values of one key in multi_value
MAX_COUNT = 5  # marks of one key in count


@dataclass(frozen=True)
class Sample:
    """One prompt with one question at its end: token ids, and the expected token ids.

    ``blanks``: ranges [begin, end) in ``answer`` that are free while the rest is forced. None: all is free,
    up to ``;``.
    """

    task: str
    prompt: list[int]
    answer: list[int]
    question_tokens: int = 4
    blanks: tuple[tuple[int, int], ...] | None = None


class Writer:
    """Collects the statements and the question of one text; keys are unambiguous within it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.used: set[int] = set()
        self.statements: list[list[int]] = []
        self.question: tuple[list[int], list[int]] | None = None  # and its answer, token ids
        self.room_tokens = 0
        self._fresh = rng.permutation(_KEYS).tolist()

    def key(self) -> list[int]:
        """Two words, a key not used before in this text."""
        while self._fresh:
            index = self._fresh.pop()
            if index not in self.used:
                return self._take(index)
        raise ValueError(f"a text needs more than {_KEYS} keys; use a shorter one")

    def near_key(self, key: list[int]) -> list[int]:
        """A new key that shares one word with ``key``."""
        first, second = key[0] - ADJECTIVE0, key[1] - NOUN0
        for _ in range(32):
            if self.rng.integers(2):
                index = first * len(NOUNS) + int(self.rng.integers(len(NOUNS)))
            else:
                index = int(self.rng.integers(len(ADJECTIVES))) * len(NOUNS) + second
            if index not in self.used:
                return self._take(index)
        return self.key()

    def _take(self, index: int) -> list[int]:
        self.used.add(index)
        first, second = divmod(index, len(NOUNS))
        return [ADJECTIVE0 + first, NOUN0 + second]

    def numbers(self, n: int) -> list[int]:
        """``n`` different two-digit numbers."""
        if n == 2:  # the usual case, without the cost of choice()
            first = int(self.rng.integers(90))
            second = int(self.rng.integers(89))
            return [NUMBER0 + 10 + first, NUMBER0 + 10 + second + (second >= first)]
        return (NUMBER0 + 10 + self.rng.choice(90, n, replace=False)).tolist()

    def state(self, *statements: list[int]) -> bool:
        """Adds the statements if all fit, otherwise none."""
        need = sum(map(len, statements))
        if need > self.room_tokens:
            return False
        self.room_tokens -= need
        self.statements.extend(statements)
        return True

    def ask(self, question: list[int], answer: list[int]) -> None:
        """The first question of a text is the one that is asked; its answer ends with ``;``."""
        self.question = self.question or (question, answer)

    def fact(self, key: list[int], is_asked: bool = False) -> bool:
        value = [*self.numbers(2), END]
        if not self.state([*key, IS, *value]):
            return False
        if is_asked:
            self.ask([ASK, *key, IS], value)
        return True


def is_correct(task: str, answer: Sequence[int], given: Sequence[int]) -> bool:
    """Exact match of the tokens up to the first ``;``; the values of multi_value in any order."""
    given = list(given)
    given = given[: given.index(END) + 1] if END in given else given
    if task == "multi_value":
        return len(given) == len(answer) and (
            sorted(given[::2]) == sorted(answer[::2]) and given[1::2] == list(answer[1::2])
        )
    return given == list(answer)


def _write_recall(w: Writer) -> None:
    w.fact(w.key(), is_asked=True)
    while w.room_tokens >= 6:
        w.fact(w.key())


def _write_needle(w: Writer) -> None:
    w.fact(w.key(), is_asked=True)


def _write_multi_key(w: Writer) -> None:
    room_at_end = w.room_tokens // 2
    key = w.key()
    w.fact(key, is_asked=True)
    while w.room_tokens > room_at_end:
        if not w.fact(w.near_key(key)):
            break


def _write_multi_value(w: Writer) -> None:
    room_at_end = w.room_tokens // 2
    key, values = w.key(), w.numbers(MULTI_VALUES)
    w.state(*([*key, IS, value, END] for value in values))
    answer = [token for value in values for token in (value, COMMA)]
    answer[-1] = END
    w.ask([ALL, *key, COLON], answer)
    while w.room_tokens > room_at_end:
        if not w.state([*w.key(), IS, *w.numbers(1), END]):
            break


def _write_variables(w: Writer) -> None:
    def chain() -> bool:
        names = [w.key() for _ in range(int(w.rng.integers(2, 5)))]
        value = w.numbers(2)
        links = [[*a, IS, *b, END] for a, b in zip(names, [*names[1:], value], strict=True)]
        if not w.state(*links):
            return False
        answer = [token for name in names[1:] for token in (*name, IS)] + [*value, END]
        w.ask([TRACE, *names[0], IS], answer)
        return True

    _fill_half(w, chain)


def _write_copy(w: Writer) -> None:
    def span() -> bool:
        key, n = w.key(), int(w.rng.integers(8, 17))
        # Numbers, adjectives and nouns are contiguous in the vocabulary.
        words = (NUMBER0 + 10 + w.rng.integers(90 + len(ADJECTIVES) + len(NOUNS), size=n)).tolist()
        if not w.state([*key, IS, *words, END]):
            return False
        w.ask([COPY, *key, IS], [*words, END])
        return True

    _fill_half(w, span)


def _write_count(w: Writer) -> None:
    def tally() -> bool:
        key, n = w.key(), int(w.rng.integers(1, MAX_COUNT + 1))
        if not w.state(*([*key, TALLY, END] for _ in range(n))):
            return False
        w.ask([COUNT, *key, COLON], [NUMBER0 + n, END])
        return True

    _fill_half(w, tally)


def _fill_half(w: Writer, state: Callable[[], bool]) -> None:
    """Calls ``state`` until half of the room is filled or what it states does not fit."""
    room_at_end = w.room_tokens // 2
    while w.room_tokens > room_at_end and state():
        pass


_WRITERS = {
    "recall": _write_recall,
    "needle": _write_needle,
    "multi_key": _write_multi_key,
    "multi_value": _write_multi_value,
    "variables": _write_variables,
    "copy": _write_copy,
    "count": _write_count,
}


def _body(w: Writer, length_tokens: int) -> list[int]:
    """``#``, the statements and filler, shuffled: ``length_tokens`` ids."""
    missing = length_tokens - 1 - sum(map(len, w.statements))
    units = list(w.statements)
    while missing > 0:
        sentence = FILLER[int(w.rng.integers(len(FILLER)))]
        units.append(sentence if len(sentence) <= missing else sentence[-missing:])
        missing -= len(units[-1])
    body = [START]
    for index in w.rng.permutation(len(units)):
        body.extend(units[index])
    return body


def make_sample(task: str, length_tokens: int, seed: int) -> Sample:
    """A prompt of exactly ``length_tokens`` tokens that ends with one question of ``task``.

    Raises ValueError for an unknown task or a length below ``MIN_LENGTH_TOKENS``.
    """
    if task not in _WRITERS:
        raise ValueError(f"task={task!r}: choose one of {', '.join(TASKS)}")
    if length_tokens < MIN_LENGTH_TOKENS:
        raise ValueError(f"length_tokens={length_tokens}: use at least {MIN_LENGTH_TOKENS}")
    w = Writer(np.random.default_rng([seed, length_tokens, TASKS.index(task)]))
    w.room_tokens = length_tokens - 5  # the start mark and a question of four tokens
    _WRITERS[task](w)
    assert w.question is not None
    question, answer = w.question
    return Sample(task, _body(w, length_tokens - 4) + question, answer)
