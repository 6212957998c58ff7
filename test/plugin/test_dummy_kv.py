"""Noise in place of a transfer: the same for a prompt in any pages, different at other positions."""

import numpy as np
import torch

from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.plugin.dummy_kv import DummyKV

SHAPE = ModelShape(2, 2, 1, 8, 32, torch.bfloat16, 1.0)


def filled(pages, prompt):
    planes = [torch.zeros(64 * 32, 1, 8, dtype=torch.bfloat16) for _ in range(4)]
    host = HostPages(SHAPE, planes[:2], planes[2:])
    pages = np.array(pages)
    DummyKV(host).fill(pages, prompt)
    outside = np.setdiff1d(np.arange(64), pages)
    assert all(not t[outside].any() for t in host.k + host.v)
    return torch.stack([t[pages] for t in host.k + host.v]).float()


def test_depends_on_prompt_and_position_and_on_nothing_else():
    here, there = filled([5, 9, 2], [1, 2, 3]), filled([60, 1, 33], [1, 2, 3])
    assert torch.equal(here, there)
    assert not torch.equal(here, filled([5, 9, 2], [1, 2, 4]))
    parts = here.reshape(4 * 3, -1)  # of each layer, of keys and values, of each page
    assert len(torch.unique(parts, dim=0)) == len(parts)
    assert abs(here.std() - 1) < 0.05 and abs(here.mean()) < 0.05
