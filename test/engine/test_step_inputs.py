"""A boundary's single transfer to the device."""

import numpy as np
import pytest
import torch

from sglang_scout.engine.step_inputs import Batch, StepInputs
from sglang_scout.engine.stores import Sizes

LAYERS, ROWS, COLUMNS = 3, 5, 7


def batch(full, rng):
    full = np.array(full)
    column = np.arange(COLUMNS)
    pages = rng.integers(1, 99, (len(full), COLUMNS))
    table = np.where(column <= full[:, None], pages, -1)[:, : full.max() + 1].astype(np.int32)
    return Batch(
        table=torch.from_numpy(table),
        n_full=torch.from_numpy(full.astype(np.int32)),
        tail_slot=torch.from_numpy(rng.integers(0, 9, (LAYERS, len(full))).astype(np.int32)),
        tail_len=torch.from_numpy(rng.integers(1, 33, len(full)).astype(np.int32)),
        tail_page=torch.from_numpy(table[np.arange(len(full)), full]),
        ages=np.zeros(len(full)),
    )


@pytest.mark.parametrize("rows_of_steps", [([2, 6], [1], [0, 3, 5, 2, 6], [4, 4])])
@pytest.mark.parametrize("changes", [0, 1, 2, 5, 5000])
@pytest.mark.parametrize("lists", [1, 3])
def test_the_device_has_what_was_sent_and_nothing_of_before(rows_of_steps, changes, lists):
    rng = np.random.default_rng(3)
    sizes = Sizes(budget_pages=2, num_slots=9, max_batch=ROWS, max_pages=COLUMNS, lists=lists)
    inputs = StepInputs(LAYERS, sizes, torch.device("cpu"))
    for full in rows_of_steps:
        sent, n = batch(full, rng), len(full)
        keys = rng.permutation(10_000)[:changes] + 2**33
        slots = rng.integers(-1, 9, changes).astype(np.int32)
        got = inputs.send(sent, keys, slots)
        assert got[0].dtype == torch.int64 and got[1].dtype == torch.int32
        assert np.array_equal(got[0], keys) and np.array_equal(got[1], slots)
        n_scored = torch.where(sent.n_full > 2, sent.n_full, 0)
        empty = [0, 0, 0, -1]
        for name, expected, rest in zip(
            ("n_full", "n_scored", "tail_len", "tail_page"),
            (sent.n_full, n_scored, sent.tail_len, sent.tail_page),
            empty,
            strict=True,
        ):
            there = getattr(inputs.candidates if name.startswith("n_") else inputs, name).tolist()
            assert there == [*map(int, expected), *[rest] * (ROWS - n)], name
        assert torch.equal(inputs.tail_slot[:, :n], sent.tail_slot)
        assert (inputs.tail_slot[:, n:] == -1).all()
        for row in range(ROWS):
            count = full[row] if row < n else 0
            if count:
                assert torch.equal(inputs.candidates.table[row, :count], sent.table[row, :count])
            assert (inputs.candidates.table[row, count:] == -1).all(), "full pages alone"
        candidates = inputs.candidates
        for each in range(lists):
            assert torch.equal(candidates.list_n_full[each::lists], candidates.n_full)
            assert torch.equal(candidates.list_n_scored[each::lists], candidates.n_scored)
            assert torch.equal(candidates.list_table[each::lists], candidates.table)
            places = candidates.digest_rows[each::lists]
            assert ((places < 0) == (candidates.table < 0)).all()
            assert torch.equal(
                places.clamp(min=-1), torch.where(places < 0, -1, candidates.table * lists + each)
            )
