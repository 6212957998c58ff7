"""HGCA's Algorithm 1 of the benchmark against a loop over tokens."""

import pytest
import torch

from benchmark.accuracy import hgca
from benchmark.accuracy.hgca import BLOCK, Decode, attended

START, END, WINDOW = 160, 250, 96


def kept_by_tokens(logits, beta):
    """[T] bool of one KV head, and what each decoded token may see; ``logits`` [G, R, T]."""
    kept, average, seen = set(), {}, []
    first = None
    for row in range(logits.shape[1]):
        at = START - BLOCK + row
        begin = max(0, (at // BLOCK - WINDOW // BLOCK + 1) * BLOCK)
        if row > BLOCK:
            kept |= {n for n in range(first, begin) if average[n] > beta / WINDOW}
        if row == BLOCK:
            asked = logits[:, :BLOCK, :begin].softmax(-1).mean(1).amax(0)
            kept |= {n for n in range(begin) if asked[n] > beta / begin}
        first = begin
        weight = logits[:, row, begin : at + 1].softmax(-1).amax(0)
        for n in range(begin, at + 1):
            one = float(weight[n - begin])
            average[n] = 0.9 * average[n] + 0.1 * one if n in average else one
        if row >= BLOCK:
            seen.append({*kept, *range(begin, at + 1)})
    return kept, seen


@pytest.mark.parametrize("beta", [0.25, 1.0])
def test_tokens_kept_are_those_of_a_loop(beta):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 3, END - START + BLOCK, END, generator=generator)
    visible, kept = attended(logits, START, WINDOW, beta)
    for head in range(2):
        expected, seen = kept_by_tokens(logits[head], beta)
        assert set(kept[head].nonzero().ravel().tolist()) == expected and expected
        for row, tokens in enumerate(seen):
            assert set(visible[head, row].nonzero().ravel().tolist()) == tokens


def test_without_a_threshold_it_is_full_attention(tiny_model):
    tokens = torch.randint(0, 500, (END,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        text = Decode(hgca.Model(tiny_model("llama")), tokens, START)
        nats, kept = text.sparse(WINDOW, 0.0)
        assert nats == pytest.approx(text.full_nats, abs=1e-5) and set(sum(kept, [])) == {1.0}
        assert abs(text.sparse(WINDOW, 20.0)[0] - text.full_nats) > 1e-4
    assert all(0 < x <= 1 for heads in text.needed for x in heads)
