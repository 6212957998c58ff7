"""Batches of texts with answers, and scoring of a model's predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmark.accuracy import tasks, vocabulary


@dataclass
class Batch:
    """``tokens`` and ``positions`` [B, T]; ``is_answer`` [B, T]: the next token is supervised."""

    tokens: Tensor
    positions: Tensor
    is_answer: Tensor
    answers: list[tuple[int, str, int, int]]  # row, task, begin, end


def make_batch(documents: list[tasks.Document], positions: list[np.ndarray]) -> Batch:
    tokens = np.stack([document.tokens for document in documents])
    is_answer = np.zeros(tokens.shape, dtype=bool)
    answers = []
    for row, document in enumerate(documents):
        for task, begin, end in document.answers:
            is_answer[row, begin - 1 : end - 1] = True
            answers.append((row, task, begin, end))
    as_tensor = torch.from_numpy
    return Batch(as_tensor(tokens), as_tensor(np.stack(positions)), as_tensor(is_answer), answers)


def jump_positions(tokens: np.ndarray, rng: np.random.Generator, limit: int) -> np.ndarray:
    """Positions [T] that skip ahead at a few ``;``, as if text had been removed there.

    Trains rotary distances of up to ``limit`` tokens on a short text.
    """
    gaps = np.ones(len(tokens), dtype=np.int64)
    gaps[0] = 0
    ends = np.flatnonzero(tokens[:-1] == vocabulary.END) + 1
    chosen = rng.choice(ends, min(len(ends), int(rng.integers(1, 9))), replace=False)
    total = int(rng.integers(limit))
    gaps[chosen] += rng.multinomial(total, np.full(len(chosen), 1 / len(chosen)))
    return gaps.cumsum()


def count_correct(batch: Batch, predicted: Tensor) -> dict[str, list[int]]:
    """Per task [right, asked], of ``predicted`` [B, T], the most probable token after each token.

    An answer is right when each of its tokens is the most probable one given the text before it:
    then greedy decoding gives exactly this answer. For multi_value any value not yet given counts.
    """
    score: dict[str, list[int]] = {}
    tokens, guesses = batch.tokens.numpy(), predicted.numpy()
    for row, task, begin, end in batch.answers:
        want = tokens[row, begin:end]
        got = guesses[row, begin - 1 : end - 1]
        if task == "multi_value":
            right = all(
                g in want[i::2] if i % 2 == 0 else g == w
                for i, (g, w) in enumerate(zip(got, want, strict=True))
            )
        else:
            right = bool((want == got).all())
        entry = score.setdefault(task, [0, 0])
        entry[0] += right
        entry[1] += 1
    return score
