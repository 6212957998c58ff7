"""Questions about long texts: as the model was trained on them, as requests, and answered by full attention."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re

import pytest
import torch

from benchmark.accuracy import planted, questions, tasks, vocabulary
from benchmark.accuracy.plain_answers import PlainAnswers
from benchmark.accuracy.study.model import Model

TEXTS = "c914ffef1b9cd7c81eff6108ba690d7a394c50fe308a159b76e7c10bc66dd492"


def test_texts_of_tasks_stay_as_they_are():
    """The model was trained on these, and answers them, so a change of the generator must be detected."""
    samples = [tasks.make_sample(t, 96 + 400 * i, seed=i) for t in tasks.TASKS for i in range(3)]
    texts = json.dumps([(sample.prompt, sample.answer) for sample in samples])
    assert hashlib.sha256(texts.encode()).hexdigest() == TEXTS
    assert [len(s.prompt) for s in samples] == [96, 496, 896] * len(tasks.TASKS)
    assert vocabulary.VOCAB_TOKENS == 576


@pytest.mark.parametrize(
    ("task", "answer", "right", "wrong"),
    [
        ("recall", "42 17 ;", "42 17 ; ? amber", ("42 17", "17 42 ;")),
        ("multi_value", "1 , 2 , 3 ;", "3 , 1 , 2 ;", ("3 , 3 , 2 ;", "1 , 2 ;", "1 2 , 3 , ;")),
    ],
)
def test_what_is_a_right_answer(task, answer, right, wrong):
    for given in (right, *wrong):
        ids = ([vocabulary.ID_OF[word] for word in text.split()] for text in (answer, given))
        assert tasks.is_correct(task, *ids) == (given == right), given


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_decode_server_reads_the_question(task):
    sample = tasks.make_sample(task, 200, 3)
    body = questions.payload(sample)
    prompt, grammar = body["input_ids"], body["sampling_params"]["ebnf"]
    forced = [int(word.strip("<[]>")) for word in grammar.split("\n")[0].split()[1:-1]]
    assert prompt + forced == sample.prompt and len(forced) == sample.question_tokens
    assert len(sample.answer) <= questions.ANSWER_TOKENS
    right = {"output_ids": forced + sample.answer, "meta_info": {"finish_reason": {"type": "stop"}}}
    assert questions.is_right(sample, right)
    wrong = {**right, "output_ids": forced + sample.answer[:-2] + [vocabulary.END]}
    assert not questions.is_right(sample, wrong)
    with pytest.raises(ValueError, match="was not forced"):
        questions.is_right(sample, {**right, "output_ids": sample.answer + forced})
    in_prompt = dataclasses.replace(sample, question_tokens=0)
    body = questions.payload(in_prompt)
    assert body["input_ids"] == sample.prompt
    assert body["sampling_params"]["ebnf"].split("\n")[0].split() == ["start:", "any*"]
    assert questions.is_right(in_prompt, {**right, "output_ids": sample.answer})
    assert not questions.is_right(in_prompt, {**right, "output_ids": forced + sample.answer})


def test_of_a_planted_answer_only_the_numbers_are_free(monkeypatch):
    text = "Some words of a long text, and a few more. " * 2000
    encode = lambda text: [17 + ord(x) for x in text]  # noqa: E731
    document = questions.planted.make_document(encode, text, 0)
    monkeypatch.setattr(questions, "_planted_document", lambda index: document)
    for task in questions.SOURCES["planted"].tasks:
        sample = questions.planted_sample(task, 4096, 0)
        body = questions.payload(sample)
        assert body["input_ids"] == document.tokens[:4096]
        words = body["sampling_params"]["ebnf"].split("\n")[0].split()[1:]
        assert len(words) == body["sampling_params"]["max_new_tokens"]
        free = [i - sample.question_tokens for i, word in enumerate(words) if word == "any"]
        numbers = 3 if task == "joined" else 1
        assert len(free) == 5 * numbers and free[-1] == len(sample.answer) - 1
        said = "".join(chr(x - 17) for x in sample.answer)
        assert all(said[i].isdigit() for i in free)
        given = sample.prompt[4096:] + sample.answer
        right = {"output_ids": given, "meta_info": {"finish_reason": {"type": "length"}}}
        assert questions.is_right(sample, right)
        wrong = {**right, "output_ids": [*given[:-1], given[-1] - 1]}
        assert not questions.is_right(sample, wrong)


def words(text: str) -> list[int]:
    """One token per word, sign and digit."""
    return [hash(x) % 100_003 for x in re.findall(r"\d|[a-zA-Z]+|\s|[^\w\s]", text)]


def test_documents_hold_the_facts_that_are_asked_for():
    text = "and they went up to the city, and there was no end of it. " * 3000
    for index in range(4):
        document = planted.make_document(words, text, index)
        again = planted.make_document(words, text, index)
        assert document == again
        assert len(document.tokens) == planted.CUTS[-1] + planted.WINDOW_TOKENS
        assert {q.cut for q in document.questions} == set(planted.CUTS)
        marker = words("Remember")[0]
        for cut in planted.CUTS:
            assert marker not in document.tokens[cut : cut + planted.WINDOW_TOKENS]
        for question in document.questions:
            known = document.tokens[: question.cut]
            for begin, end in question.numbers:
                assert end - begin == 5
                number = question.answer[begin:end]
                assert any(known[i : i + 5] == number for i in range(len(known)))
    kinds = {q.kind for i in (0, 1) for q in planted.make_document(words, text, i).questions}
    assert kinds == set(planted.KINDS)
    with pytest.raises(ValueError, match="tokens left"):
        planted.make_document(words, text[:9000], 0)


def test_an_answer_is_right_if_greedy_decoding_gives_it(tiny_model):
    plain, free = PlainAnswers(tiny_model("qwen3")), (1, 4)
    prompt = torch.randint(0, 500, (75,), generator=torch.Generator().manual_seed(2)).tolist()
    model = Model(tiny_model("qwen3"))
    written = list(prompt)
    for _ in range(5):
        _, last = model.prefill(torch.tensor(written))
        written.append(int(model.log_probs(last[-1:]).argmax()))
    answer = written[75:]
    assert len(set(answer)) > 1, "tokens that repeat would agree with anything"

    def right(answer, blanks=None, task="recall"):
        return plain.is_right(tasks.Sample(task, prompt, answer, 4, blanks))

    assert right(answer)
    for i in range(5):
        wrong = [*answer[:i], answer[i] + 1, *answer[i + 1 :]]
        assert not right(wrong)
        if i >= free[0]:  # logits after a forced token are unknown
            assert right(wrong, (free,)) == (i >= free[1]), "what is forced is not asked for"
    swapped = [answer[2], answer[1], answer[0], answer[3], answer[4]]
    assert right(swapped, task="multi_value")
    assert right(swapped) == (answer[0] == answer[2])
