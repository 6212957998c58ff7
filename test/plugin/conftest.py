"""The comparison of the op tests, for what the plugin makes of ops."""

import pytest
import torch

from sglang_scout.ops.op import Op


@pytest.fixture(scope="session")
def agree():
    """agree(op, actual, expected): fail unless equal within the op's own tolerance for float32."""

    def check(op: Op, actual: torch.Tensor, expected: torch.Tensor) -> None:
        mismatch = op.tolerances["float32"].mismatch(actual.double(), expected.double())
        assert not mismatch, f"{op.name}: {mismatch}"

    return check
