"""The plain PyTorch version of HGCA for a table of settings, against the float64 oracle of its algorithms."""

import numpy as np
import torch
from hgca_oracle import Oracle

from benchmark.systems.hgca import Layer, entries


def test_every_setting_is_the_oracle_s():
    make = torch.Generator().manual_seed(3)
    heads, group, size, prompt, steps = 2, 3, 8, 150, 120

    def draw(*shape):
        return torch.randn(*shape, generator=make)

    k, v = draw(heads, prompt, size), draw(heads, prompt, size)
    settings = [(64, 0.5), (96, 1.0), (128, 2.0), (96, 0.0)]
    window, beta = (torch.tensor(x) for x in zip(*settings, strict=True))
    layer = Layer(k, v, prompt + steps, beta, window)
    oracles = [Oracle(k.transpose(0, 1), v.transpose(0, 1), w, 0.5, beta=b) for w, b in settings]
    kept = 0
    for _ in range(steps):
        q, new_k, new_v = draw(heads * group, size), draw(heads, size), draw(heads, size)
        rows = (x.expand(len(settings), -1, -1) for x in (q, new_k, new_v))
        out, _ = layer.step(*rows, 0.5)
        for row, oracle in zip(out, oracles, strict=True):
            np.testing.assert_allclose(row, oracle.step(q, new_k, new_v), rtol=1e-4, atol=1e-5)
        kept = [[len(x) for x in oracle.kept] for oracle in oracles]
    assert layer.keep.sum(-1).tolist() == kept and 0 < min(map(min, kept))
    assert layer.kept()[3] == 1 > layer.kept()[0]


def test_entries_that_hold_the_mass():
    assert entries(torch.tensor([[0.995, 0.003, 0.002, 0.0], [0.25] * 4])) == [0.25, 0.25, 1.0]
