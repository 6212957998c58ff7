"""Documents with planted facts, and the answers of full attention to questions about them."""

from __future__ import annotations

import pytest
import torch

from benchmark.accuracy import planted, tasks
from benchmark.accuracy.plain_answers import PlainAnswers
from benchmark.accuracy.study.model import Model


def words(text: str) -> list[int]:
    """One token per word, sign and digit."""
    import re

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
