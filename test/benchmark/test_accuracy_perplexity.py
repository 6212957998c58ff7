"""Teacher-forced perplexity without servers: what is forced, what is scored, what the table says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmark.accuracy import perplexity, table, tasks
from benchmark.accuracy.perplexity_table import perplexity_section

ROOT = Path(__file__).resolve().parents[2]

FORCED = 64
MODEL = str(ROOT / "benchmark" / "accuracy" / "recall_model")


def answer_of(hidden, output_ids):
    return {"output_ids": output_ids, "meta_info": {"hidden_states": hidden}}


def test_texts_are_held_out_and_end_with_answers():
    text = perplexity.make_text(512, FORCED, 7, 0)
    assert len(text.tokens) == 512 and text.answers
    assert text.answers[0][1] >= 512 - FORCED, "what is forced holds all questions"
    again = perplexity.make_text(512, FORCED, 7, 0)
    assert (text.tokens == again.tokens).all()
    assert (text.tokens != perplexity.make_text(512, FORCED, 7, 1).tokens).any()
    body = perplexity.forced_payload(text, FORCED)
    forced = [int(word.strip("<[]>")) for word in body["sampling_params"]["ebnf"].split()[1:]]
    assert body["input_ids"] + forced == text.tokens.tolist()
    assert body["sampling_params"]["max_new_tokens"] == FORCED and body["return_hidden_states"]


def test_every_forced_token_but_the_first_counts_once():
    text = perplexity.make_text(512, FORCED, 7, 2)
    answers, others = (x.tolist() for x in perplexity.counted_tokens(text, FORCED))
    assert sorted(answers + others) == list(range(512 - FORCED + 1, 512))
    inside = {at for _, begin, end in text.answers for at in range(begin, end)}
    assert set(answers) <= inside and not set(others) & inside


def test_hidden_states_are_those_of_the_decode_steps():
    steps = [[float(i), 1.0] for i in range(3)]
    prompt = [[9.0, 9.0]] * 5
    for given in (steps, [prompt, *steps], [[8.0, 8.0], *steps]):
        found = perplexity.hidden_of_steps(answer_of(given, [4, 5, 6, 7]), [4, 5, 6, 7])
        assert found.tolist() == steps
    with pytest.raises(ValueError, match="not the 4 forced"):
        perplexity.hidden_of_steps(answer_of(steps, [4, 5, 6, 8]), [4, 5, 6, 7])
    with pytest.raises(ValueError, match="2 hidden states for 3"):
        perplexity.hidden_of_steps(answer_of(steps[:2], [4, 5, 6, 7]), [4, 5, 6, 7])


def test_nats_and_perplexity_of_a_known_distribution():
    embedding = torch.eye(4)
    hidden = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]))
    nats = perplexity.token_nats(hidden, torch.tensor([3, 0]), embedding)
    assert nats.exp().tolist() == pytest.approx([1 / 0.4, 1 / 0.7], rel=1e-5)
    found = perplexity.part([nats[:1], nats[1:]])
    assert found["tokens"] == 2 and found["tokens_by_text"] == [1, 1]
    assert found["perplexity"] == pytest.approx(math.sqrt(1 / 0.4 / 0.7), rel=1e-4)


def test_the_model_knows_answers_and_cannot_know_questions():
    """The reference itself, on a short text: a plain forward pass of the model in the tree."""
    text = perplexity.make_text(256, FORCED, 7, 3)
    nats = torch.full((256,), torch.nan)
    nats[256 - FORCED + 1 :] = perplexity.reference_nats(MODEL, text, FORCED)
    answers, others = perplexity.counted_tokens(text, FORCED)
    assert nats[answers].mean() < 0.5 < 1.0 < nats[others].mean()


def row(policy, budget, answer, gap=None):
    part = {"tokens": 10, "nats": answer, "perplexity": math.exp(answer)}
    fields = dict(model="m", weights="w", dtype="d", seed=1, length_tokens=512, forced_tokens=64)
    fields |= dict(benchmark="perplexity", status="ok", texts=2, policy=policy)
    fields |= dict(budget_tokens=budget, answer=part, other=part)
    return {**fields, "cpu_compute_ratio": None if gap else 0.1, "reference_gap_nats": gap}


def test_the_table_says_what_the_policies_lose():
    rows = [row("full", None, 0.1, gap=0.0021), row("scout", 512, 0.15)]
    title, text, lines = perplexity_section(rows, table.markdown_table)
    assert title.startswith("## Perplexity") and "0.0021 nats" in text
    assert "| full attention | 1.1052 | – | 1.1052 | – | – |" in lines
    assert "| scout, 512 | 1.1618 | +0.0500 | 1.1618 | +0.0500 | 0.100 |" in lines
    assert perplexity_section([], table.markdown_table) == []
    with pytest.raises(ValueError, match="differ in texts"):
        perplexity_section([*rows, {**rows[0], "texts": 3}], table.markdown_table)


def test_the_vocabulary_is_the_models():
    assert perplexity.output_embedding(MODEL).shape[0] == tasks.VOCAB_TOKENS
