"""The oracle of HGCA against independent properties."""

import numpy as np
import pytest
from hgca_oracle import Oracle, softmax

HQ, H, D, SCALE = 4, 2, 16, 0.25


def run(prompt, steps, window=96, seed=0, **settings):
    """The oracle and, for each step, its output and a function that attends over given tokens of each head."""
    rng = np.random.default_rng(seed)
    oracle = Oracle(*rng.standard_normal((2, prompt, H, D)), window, SCALE, **settings)
    results = []
    for _ in range(steps):
        q, new = 2 * rng.standard_normal((HQ, D)), rng.standard_normal((2, H, D))
        out = oracle.step(q, *new)
        logits = np.einsum("hgd,thd->hgt", q.reshape(H, -1, D), oracle.k) * SCALE

        def dense(tokens, logits=logits, v=oracle.v):
            parts = [softmax(logits[h][:, tokens]) @ v[tokens, h] for h in range(H)]
            return np.concatenate(parts)

        results.append((out, dense, oracle.first, len(oracle.k)))
    return oracle, results


@pytest.mark.parametrize("lands_after", [1, 3, 50])
@pytest.mark.parametrize("prompt", [1, 70, 300])
def test_beta_0_is_full_attention(prompt, lands_after):
    _, results = run(prompt, 120, beta=0.0, lands_after=lands_after)
    for out, dense, _, length in results:
        np.testing.assert_allclose(out, dense(np.arange(length)), atol=1e-12)


def test_beta_infinity_is_the_window_once_the_evaluation_has_landed():
    oracle, results = run(300, 120, beta=np.inf, lands_after=3)
    for step, (out, dense, first, length) in enumerate(results):
        np.testing.assert_allclose(
            out, dense(np.arange(0 if step < 3 else first, length)), atol=1e-12
        )
        # Blocks leave whole, when the one being filled begins.
        assert length - first == 96 - 32 + (length - 1) % 32 + 1
    assert oracle.kept == [[], []]


def test_some_tokens_are_kept_and_each_head_has_its_own():
    oracle, _ = run(300, 200)
    assert oracle.kept[0] != oracle.kept[1]
    for tokens in oracle.kept:
        assert 0 < len(tokens) < oracle.first
        assert tokens == sorted(set(tokens)) and tokens[-1] < oracle.first


def test_a_full_head_raises_its_beta():
    oracle, _ = run(300, 200, cap=20)
    assert [len(tokens) for tokens in oracle.kept] == [20, 20]
    assert oracle.raised == sum(np.log2(oracle.beta)) > 0
