"""Noise in place of a transfer: the same for a prompt in any pages, different at other positions."""

import os

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


def test_does_not_depend_on_the_number_of_threads():
    cpus, together = os.sched_getaffinity(0), filled(range(1, 64), [1, 2, 3])
    os.sched_setaffinity(0, {min(cpus)})
    try:
        assert torch.equal(together, filled(range(1, 64), [1, 2, 3]))
    finally:
        os.sched_setaffinity(0, cpus)
