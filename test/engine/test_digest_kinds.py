"""Digests of files: those made with another file count as not arrived."""

import dataclasses

import numpy as np
import pytest
import torch

from page_weights import digest_weights, identity, rule_of
from sglang_scout.engine.digest_kinds import Calibrated
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.stores import HostPages, ModelShape

L, H, D, SIZE = 3, 2, 32, 32
SHAPE = ModelShape(L, 4, H, D, SIZE, torch.float32, D**-0.5)


def test_digests_made_with_another_file_count_as_not_arrived():
    here = digest_weights(identity(L, 4, H, D))
    pool = DigestPool(SHAPE, 6, "cpu", rule_of("calibrated", weights=here))
    host = HostPages(SHAPE, *([torch.randn(6 * SIZE, H, D) for _ in range(L)] for _ in "kv"))
    there = dataclasses.replace(here, arrays={k: x + 1e-3 for k, x in here.arrays.items()})
    for weights, pages in ((here, [1, 2]), (there, [3])):
        sender = DigestPool(SHAPE, 6, "cpu", rule_of("calibrated", weights=weights))
        sender.build(np.array(pages), host)
        for ours, theirs in zip(pool.parts, sender.parts, strict=True):
            ours[:, pages] = theirs[:, pages]
    assert list(pool.accept(np.array([1, 2, 3, 4]))) == [3, 4]
    pool.build(np.array([3, 4]), host)
    pool.valid[:] = False
    assert not len(pool.accept(np.array([1, 2, 3, 4])))
    with pytest.raises(ValueError, match="needs the weights of a pilot_file or a digest_file"):
        DigestPool(SHAPE, 6, "cpu", SelectionRule(Calibrated))
