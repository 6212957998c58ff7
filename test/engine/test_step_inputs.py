"""Changes of the slot table in a boundary's transfer to the device; test_recorded_step.py has the rest."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_scout.engine.requests import Batch, Request
from sglang_scout.engine.step_buffers import StepInputs
from sglang_scout.engine.stores import Sizes

LAYERS = 3
ONE = np.ones(1, np.int32)
BATCH = Batch(
    [Request()], np.array([[4, 5]], np.int32), ONE, np.ones((LAYERS, 1), np.int32), ONE, ONE, ONE
)


@pytest.fixture
def residency():
    """Stands in for the residency table."""
    slot_of, none = np.full((LAYERS, 3000), -1, np.int32), (ONE[:0].astype(np.int64), ONE[:0])
    table = SimpleNamespace(num_layers=LAYERS, slot_of=slot_of, changes=none)
    table.take_changes = lambda: table.changes
    return table


@pytest.fixture
def inputs(residency):
    sizes = Sizes(budget_pages=2, num_slots=9, max_batch=5, max_pages=7)
    return StepInputs(residency, sizes, torch.device("cpu"))


@pytest.mark.parametrize("changes", [0, 5, 5000])
def test_few_travel_with_the_step_and_many_on_their_own(residency, inputs, changes):
    rng = np.random.default_rng(3)
    for _ in range(3):
        keys = rng.permutation(residency.slot_of.size)[:changes]
        residency.changes = keys, rng.integers(-1, 9, changes).astype(np.int32)
        residency.slot_of.flat[keys] = residency.changes[1]
        inputs.send(BATCH)
        assert np.array_equal(inputs.slot_of, residency.slot_of)


def test_a_change_keeps_its_64_bits(residency, inputs):
    """In a table of more than 2^32 entries, as 80 layers of a large host's pages have."""
    heard = []
    flat = SimpleNamespace(index_copy_=lambda _, *change: heard.extend(x.tolist() for x in change))
    inputs.slot_of = SimpleNamespace(view=lambda _: flat)
    residency.changes = np.array([2**33 + 5]), np.array([3], np.int32)
    inputs.send(BATCH)
    assert heard == [[2**33 + 5], [3]]
