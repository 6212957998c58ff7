"""The synthetic tasks: a reader that knows only the text finds every answer; seeds reproduce."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.accuracy import tasks, vocabulary

LENGTHS = st.integers(min_value=tasks.MIN_LENGTH_TOKENS, max_value=1500)
SEEDS = st.integers(min_value=0, max_value=2**32)
PINNED_PROMPT = (
    "# would take . lonely marble = brave ladder ; quiet pillar = noble oak ; noble oak = 32 "
    "35 ; they sat down and talked about many things . brave ladder = 71 22 ; proud fountain "
    "= late marble ; late marble = 61 52 ; the sun is up and we go . the grass is green and "
    "the sky has no end . hollow bell = proud fountain ; polar beacon = quiet pillar ; grand "
    "maple = lonely marble ; fragile fountain = polar beacon ; trace hollow bell ="
)
PINNED_ANSWER = "proud fountain = late marble = 61 52 ;"


def statements(words: list[str]) -> tuple[dict[str, list[list[str]]], dict[str, int]]:
    """Contents of a text: the values of every key in text order, and its tally marks."""
    values: dict[str, list[list[str]]] = {}
    tally: dict[str, int] = {}
    for at, word in enumerate(words):
        key = " ".join(words[at - 2 : at])
        if word == "=":
            values.setdefault(key, []).append(words[at + 1 : words.index(";", at)])
        elif word == "+":
            tally[key] = tally.get(key, 0) + 1
    return values, tally


def solve(context: str, question: str) -> list[str]:
    """The answer's words, from the text alone; the values of ``all`` in text order."""
    values, tally = statements(context.split())
    kind, first, second, _ = question.split()
    key = f"{first} {second}"
    if kind == "count":
        return [str(tally[key]), ";"]
    if kind == "all":
        assert len(values[key]) == tasks.MULTI_VALUES
        listed = [word for value in values[key] for word in (*value, ",")]
        return [*listed[:-1], ";"]
    assert len(values[key]) == 1, f"{key} has more than one value"
    if kind == "trace":
        chain = list(values[key][0])
        while " ".join(chain[-2:]) in values:
            chain += ["=", *values[" ".join(chain[-2:])][0]]
        return [*chain, ";"]
    return [*values[key][0], ";"]


@pytest.mark.parametrize("task", tasks.TASKS)
@settings(max_examples=40, deadline=None)
@given(length=LENGTHS, seed=SEEDS)
def test_answer_follows_from_the_text_and_length_is_exact(task, length, seed):
    sample = tasks.make_sample(task, length, seed)
    assert len(sample.prompt) == length
    words = sample.prompt_text.split()
    found = vocabulary.to_ids(" ".join(solve(" ".join(words[:-4]), " ".join(words[-4:]))))
    assert tasks.is_correct(task, sample.answer, found)


def test_texts_stay_as_they_are():
    """The model was trained on these texts: a change of the generator must be detected."""
    sample = tasks.make_sample("variables", 96, 7)
    assert sample.prompt_text == PINNED_PROMPT
    assert sample.answer_text == PINNED_ANSWER
    assert vocabulary.VOCAB_TOKENS == 576


def test_scoring():
    ids = vocabulary.to_ids
    assert tasks.is_correct("recall", ids("42 17 ;"), ids("42 17 ; ? amber"))
    assert not tasks.is_correct("recall", ids("42 17 ;"), ids("42 17"))
    assert not tasks.is_correct("recall", ids("42 17 ;"), ids("17 42 ;"))
    assert tasks.is_correct("multi_value", ids("1 , 2 , 3 ;"), ids("3 , 1 , 2 ;"))
    assert not tasks.is_correct("multi_value", ids("1 , 2 , 3 ;"), ids("3 , 3 , 2 ;"))
    assert not tasks.is_correct("multi_value", ids("1 , 2 , 3 ;"), ids("1 , 2 ;"))
    assert not tasks.is_correct("multi_value", ids("1 , 2 , 3 ;"), ids("1 2 , 3 , ;"))
