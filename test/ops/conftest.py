"""Shared by the op tests: hypothesis settings, absent implementations, the comparison."""

import pytest
import torch
from hypothesis import settings

from sglang_scout.core.registry import Op
from sglang_scout.ops import native

# No deadline: a case takes milliseconds, but the first one loads kernels.
settings.register_profile("ops", deadline=None, max_examples=40, database=None, print_blob=True)
settings.load_profile("ops")


def pytest_runtest_setup(item):
    """A test parametrised with "native" is skipped, with the reason, where there is none."""
    callspec = getattr(item, "callspec", None)
    if callspec and "native" in callspec.params.values() and not native.available():
        pytest.skip(native._ABSENT)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request):
    """The test runs once with every instruction set that this machine has."""
    if not native.available():
        pytest.skip(native._ABSENT)
    before = native.isa()
    try:
        native.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    native.set_isa(before)


@pytest.fixture(scope="session")
def agree():
    """agree(op, actual, expected, dtype): fail unless equal within the op's own tolerance.

    ``times`` widens it where the inputs are larger than those it was declared for.
    """

    def check(op: Op, actual, expected, dtype=torch.float32, times=1.0):
        actual = actual if isinstance(actual, tuple) else (actual,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        declared = op.tolerances[str(dtype).removeprefix("torch.")]
        tolerance = declared._replace(atol=times * declared.atol, rtol=times * declared.rtol)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            mismatch = tolerance.mismatch(a.double(), e.double())
            assert not mismatch, f"{op.name}, result {index}: {mismatch}"

    return check
