"""How many kernels a layer launches on a device, by policy: counted in Triton's interpreter.

docs/gpu-design.md has the numbers. The launches of a quantised projection are in test/plugin/test_model.py.
"""

from functools import partial

import pytest
import torch

from graph_worker import GraphWorker  # skips without Triton's interpreter
from launches import Launches
from mini_worker import HIDDEN, SIZE
from sglang_scout.engine.ahead import QueryHeads, QueryProjector

ROWS, LAYERS = 2, 3
PREDICTED = ["norm_kernel", "mm", "rotate_kernel"]
SCORED = ["query_digits_kernel", "rotated_sums_kernel", "select_kernel"]
ROTATED = [*PREDICTED, *SCORED, "post_kernel"]
BOUNDS = [*PREDICTED, "bounds_kernel", "select_kernel", "post_kernel"]
STAGED = ["stage_kernel", "lt", "masked_fill"]
FETCHED = [*PREDICTED, *SCORED, *STAGED]
FORECAST = [*PREDICTED, "embedding_scores_kernel", "select_kernel", *STAGED]


@pytest.mark.parametrize(
    ("policy", "config", "ahead", "attends"),
    [
        ("scout", '{"digest": "rotated-2"}', ROTATED, 4),
        ("scout", '{"digest": "rotated-2", "grain": "head"}', ROTATED, 4),
        ("scout", '{"digest": "minmax"}', BOUNDS, 3),
        ("infinigen", "{}", FETCHED, 5),
        ("sparda", '{"forecast_file": "w.npz"}', FORECAST, 5),
        ("rheo", '{"pilot_file": "w.npz"}', [], 9),
    ],
)
def test_launches_of_a_layer(make, policy, config, ahead, attends):
    settings = {"policy": policy, "config": config, "budget_tokens": 4 * SIZE, "pages": 20}
    sizes = {"layers": LAYERS, "max_batch": ROWS, "dtype": torch.bfloat16}
    worker = make(GraphWorker, verify=False, **sizes, **settings)
    engine, shape = worker.engine, worker.shape
    heads = shape.num_q_heads if engine.parts.policy.query.attends else shape.num_kv_heads
    size, ones = shape.head_dim, partial(torch.ones, dtype=shape.dtype)
    table = torch.ones(4, size)
    with_norm = QueryHeads(heads, size, size, True, lambda: table, ones(size), 1e-6)
    projector = QueryProjector(ones(HIDDEN), 1e-6, with_norm, ones(heads * size, HIDDEN))
    engine.selector._projectors = [projector] * LAYERS
    engine.pause()
    x, residual = ones(2, ROWS, HIDDEN)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    counts = shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads
    new = [ones(ROWS, n, size) for n in counts]
    for layer in range(LAYERS - 1):
        with Launches() as before:
            engine.layer_input(layer, x, residual, positions)
        with Launches() as attention:
            engine.attend(layer, *new)
    assert before.names == ahead
    assert len(attention.names) == attends, attention.names
    if engine.has_dense_steps:  # as many as stock: append, attention, cast
        engine.is_dense = True
        with Launches() as dense:
            engine.layer_input(0, x, residual, positions)
            engine.attend(0, *new)
        assert len(dense.names) == 3, dense.names
