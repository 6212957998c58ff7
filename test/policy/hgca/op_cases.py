"""HGCA's ops in the tables of tests of all ops."""

import torch

from sglang_scout.policy.hgca.kept_tokens import decay_mass

ONES = torch.ones(3, dtype=torch.int32)
EVERY = {
    decay_mass: lambda: (
        *(torch.rand(3, 4, 16), torch.rand(3, 4), torch.rand(7, 32, 2, 16)),
        *(torch.ones(3, 5, dtype=torch.int32), ONES, torch.ones(9, dtype=torch.int32)),
        *(ONES, ONES, ONES, torch.arange(3).int(), ONES, torch.rand(7, 5, 2, 32), 0.1, 0.1),
    ),
}
MUTATES = {decay_mass: None}
