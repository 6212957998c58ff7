"""How many kernels a layer launches on a device, by policy: counted in Triton's interpreter.

A launch is a Triton kernel, or an operation of torch that is no view and does more than allocate. docs/gpu.md has the
table.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_scout.ops import triton

pytest.importorskip("sglang_scout._native")
if not triton.interpreted():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime import interpreter  # noqa: E402

from graph_worker import GraphWorker  # noqa: E402  (needs the native module)
from mini_worker import HIDDEN  # noqa: E402
from sglang_scout.ops.op import Op  # noqa: E402
from sglang_scout.ops.predict import QueryProjector, add_norm, rotate_heads  # noqa: E402

ROWS, LAYERS = 2, 3
NONE = {"empty", "empty_like", "new_empty", "_unsafe_view", "is_pinned"}  # of torch's, beside views
ROTATED = [
    "norm_kernel",
    "mm",
    "rotate_kernel",
    "rotated_sums_kernel",
    "select_kernel",
    "post_kernel",
]
BOUNDS = [*ROTATED[:3], "bounds_kernel", *ROTATED[4:]]
STAGED = ["lt", "masked_fill", "copy_", "stage_kernel"]
FETCHED = [*ROTATED[:-1], *STAGED]
FORECAST = [*ROTATED[:3], "embedding_scores_kernel", "select_kernel", *STAGED]


class Launches(TorchDispatchMode):
    """``with Launches() as counted: ...`` leaves names in ``counted.names``."""

    def __enter__(self):
        self.names, self._stack = [], contextlib.ExitStack()
        call_op, launch = Op.__call__, interpreter.GridExecutor.__call__

        def op(op, *args, **kwargs):
            kwargs["impl"] = "triton" if "triton" in op.names() else "auto"
            return call_op(op, *args, **kwargs)

        def kernel(executor, *args, **kwargs):
            self.names.append(executor.fn.__name__)
            with _disable_current_modes():
                return launch(executor, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(Op, "__call__", op))
        self._stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", kernel))
        return super().__enter__()

    def __exit__(self, *error):
        self._stack.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket.__name__
        if not is_view and name not in NONE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def projector(shape, heads):
    """As the plugin makes it for plain weights: with a head norm and RoPE."""
    size, dtype = shape.head_dim, shape.dtype
    norm, head_norm = torch.ones(HIDDEN, dtype=dtype), torch.ones(size, dtype=dtype)
    w_q, table = torch.ones(heads * size, HIDDEN, dtype=dtype), torch.ones(4, size)

    def finish(x, positions):
        q = torch.nn.functional.linear(x, w_q)
        return rotate_heads(q, head_norm, 1e-6, table, positions, size, True, heads, size)

    return QueryProjector(lambda x, residual: add_norm(x, residual, norm, 1e-6), finish)


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
    worker = make(
        GraphWorker, layers=LAYERS, max_batch=ROWS, verify=False, policy=policy, config=config,
        dtype=torch.bfloat16, budget_tokens=128, pages=20,
    )  # fmt: skip
    engine, shape = worker.engine, worker.shape
    heads = shape.num_q_heads if engine.policy.query.attends else shape.num_kv_heads
    engine._projectors = [projector(shape, heads)] * LAYERS
    engine.pause()
    x, residual = torch.ones(2, ROWS, HIDDEN, dtype=shape.dtype)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    new = [
        torch.ones(ROWS, n, shape.head_dim, dtype=shape.dtype)
        for n in (shape.num_q_heads, *[shape.num_kv_heads] * 2)
    ]
    for layer in range(LAYERS - 1):
        with Launches() as before:
            engine.layer_input(layer, x, residual, positions)
        with Launches() as attention:
            engine.attend(layer, *new)
    assert before.names == ahead
    assert len(attention.names) == attends, attention.names
