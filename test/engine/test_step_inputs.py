"""What a boundary sends to the device in one piece."""

import numpy as np
import pytest
import torch

from sglang_scout.engine.step_inputs import Batch, StepInputs

LAYERS, ROWS, COLUMNS = 3, 5, 7


def batch(full, rng):
    full = np.array(full)
    column = np.arange(COLUMNS)
    pages = rng.integers(1, 99, (len(full), COLUMNS))
    table = np.where(column <= full[:, None], pages, -1)[:, : full.max() + 1].astype(np.int32)
    return Batch(
        table=torch.from_numpy(table), n_full=torch.from_numpy(full.astype(np.int32)),
        tail_slot=torch.from_numpy(rng.integers(0, 9, (LAYERS, len(full))).astype(np.int32)),
        tail_len=torch.from_numpy(rng.integers(1, 33, len(full)).astype(np.int32)),
        tail_page=torch.from_numpy(table[np.arange(len(full)), full]), ages=np.zeros(len(full)),
    )  # fmt: skip


@pytest.mark.parametrize("rows_of_steps", [([2, 6], [1], [0, 3, 5, 2, 6], [4, 4])])
@pytest.mark.parametrize("changes", [0, 1, 2, 5, 5000])
def test_the_device_has_what_was_sent_and_nothing_of_before(rows_of_steps, changes):
    rng = np.random.default_rng(3)
    inputs = StepInputs(LAYERS, ROWS, COLUMNS, torch.device("cpu"))
    for full in rows_of_steps:
        sent, n = batch(full, rng), len(full)
        keys = rng.permutation(10_000)[:changes] + 2**33
        slots = rng.integers(-1, 9, changes).astype(np.int32)
        warming = np.arange(n) % 2 > 0
        got = inputs.send(sent, warming, keys, slots)
        assert got[0].dtype == torch.int64 and got[1].dtype == torch.int32
        assert np.array_equal(got[0], keys) and np.array_equal(got[1], slots)
        empty = [0, 0, -1, -1]
        for name, expected, rest in zip(
            ("n_full", "tail_len", "tail_page", "warming"),
            (sent.n_full, sent.tail_len, sent.tail_page, warming),
            empty,
            strict=True,
        ):
            there = getattr(inputs, name).tolist()
            assert there == [*map(int, expected), *[rest] * (ROWS - n)], name
        assert torch.equal(inputs.tail_slot[:, :n], sent.tail_slot)
        assert (inputs.tail_slot[:, n:] == -1).all()
        for row in range(ROWS):
            count = full[row] if row < n else 0
            if count:
                assert torch.equal(inputs.table[row, :count], sent.table[row, :count])
            assert (inputs.table[row, count:] == -1).all(), "full pages alone"
