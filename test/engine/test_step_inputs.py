"""A boundary's single transfer to the device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_scout.engine.requests import Batch, Request
from sglang_scout.engine.step_buffers import StepInputs
from sglang_scout.engine.stores import Sizes

LAYERS, ROWS, COLUMNS = 3, 5, 7


class Changes:
    """Stands in for the residency table."""

    num_layers = LAYERS

    def __init__(self):
        self.slot_of = np.full((LAYERS, 3000), -1, np.int32)
        self.changes = np.zeros(0, np.int64), np.zeros(0, np.int32)

    def take_changes(self):
        return self.changes


@pytest.mark.parametrize("changes", [0, 5, 5000])
def test_the_device_has_what_was_sent_and_nothing_of_before(changes):
    """Few changes of the slot table travel with the step's inputs, many on their own."""
    rng = np.random.default_rng(3)
    sizes = Sizes(budget_pages=2, num_slots=9, max_batch=ROWS, max_pages=COLUMNS)
    residency = Changes()
    inputs = StepInputs(residency, sizes, torch.device("cpu"))
    for full in ([2, 6], [1], [0, 3, 5, 2, 6]):
        n, n_full = len(full), np.array(full, np.int32)
        table = rng.integers(1, 99, (n, max(full) + 1)).astype(np.int32)
        table[np.arange(table.shape[1]) > n_full[:, None]] = -1
        slots = rng.integers(0, 9, (LAYERS, n)).astype(np.int32)
        tail = n_full + 1, table[np.arange(n), full]
        sent = Batch([Request()] * n, table, n_full, slots, *tail, np.zeros(n))
        keys = rng.permutation(residency.slot_of.size)[:changes]
        now = rng.integers(-1, 9, changes).astype(np.int32)
        residency.changes = keys, now
        residency.slot_of.flat[keys] = now
        inputs.send(sent)
        assert np.array_equal(inputs.slot_of, residency.slot_of)
        padding = ROWS - n
        candidates = inputs.candidates
        assert candidates.n_full.tolist() == [*full, *[0] * padding]
        assert candidates.n_scored.tolist() == [*(x * (x > 2) for x in full), *[0] * padding]
        assert inputs.tail_len.tolist() == [*tail[0], *[0] * padding]
        assert inputs.tail_page.tolist() == [*tail[1], *[-1] * padding]
        assert np.array_equal(inputs.tail_slot[:, :n], sent.tail_slot)
        assert (inputs.tail_slot[:, n:] == -1).all()
        for row, count in enumerate([*full, *[0] * padding]):
            expected = sent.table[row, :count] if count else []
            assert np.array_equal(candidates.table[row, :count], expected)
            assert (candidates.table[row, count:] == -1).all(), "full pages alone"


def test_a_change_keeps_its_64_bits_among_the_words_of_a_step():
    """In a table of more than 2^32 entries, as 80 layers of a large host's pages have."""
    heard, residency = [], Changes()
    sizes = Sizes(budget_pages=2, num_slots=9, max_batch=ROWS, max_pages=COLUMNS)
    inputs = StepInputs(residency, sizes, torch.device("cpu"))
    flat = SimpleNamespace(index_copy_=lambda _, *change: heard.extend(x.tolist() for x in change))
    inputs.slot_of = SimpleNamespace(view=lambda _: flat)
    residency.changes = np.array([2**33 + 5]), np.array([3], np.int32)
    one = np.ones(1, np.int32)
    table, slots = np.array([[4, 5]], np.int32), np.ones((LAYERS, 1), np.int32)
    inputs.send(Batch([Request()], table, one, slots, one, one, np.zeros(1)))
    assert heard == [[2**33 + 5], [3]]
