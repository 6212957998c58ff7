"""The tiny models are worth comparing tokens with: varied, and the whole context counts."""

from __future__ import annotations

import random

import pytest

from make_tiny_model import ARCHITECTURES

CONTEXT_TOKENS = 600
NEW_TOKENS = 24


def continuation(model, prompt):
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_output_depends_on_the_whole_context(arch, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(arch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = random.Random(3)
    base = [source.randrange(500) for _ in range(CONTEXT_TOKENS)]
    other_start = [source.randrange(500) for _ in range(CONTEXT_TOKENS // 2)]
    prompts = [
        base,
        other_start + base[CONTEXT_TOKENS // 2 :],  # same second half
        [source.randrange(500) for _ in range(CONTEXT_TOKENS)],
    ]
    answers = [continuation(model, prompt) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    for answer in answers:
        assert len(answer) == NEW_TOKENS, "no end-of-text before the asked length"
        assert len(set(answer)) >= 5
        assert tokenizer.decode(answer).isprintable()
