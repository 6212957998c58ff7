"""Collects the statements and the question of one text of tasks.py."""

from __future__ import annotations

import numpy as np

from benchmark.accuracy.vocabulary import (
    ADJECTIVE0,
    ADJECTIVES,
    ASK,
    END,
    IS,
    NOUN0,
    NOUNS,
    NUMBER0,
)

_KEYS = len(ADJECTIVES) * len(NOUNS)
MULTI_VALUES = 3  # values of one key in multi_value
MAX_COUNT = 5  # marks of one key in count


class Writer:
    """Keys are unambiguous within a text."""

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
