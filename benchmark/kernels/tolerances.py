"""How far an implementation of an op may be from its reference, and why: for tests and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Tolerance(NamedTuple):
    """Allowed deviation from the reference, and why: ``|a - e| <= atol + rtol * |e|``. A NaN never passes; infinities
    must be equal."""

    atol: float
    rtol: float
    reason: str

    def mismatch(self, actual: Any, expected: Any) -> str:
        """One line about the elements of two numpy or torch arrays that differ; "" if none."""
        if tuple(actual.shape) != tuple(expected.shape):
            return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        bound = self.atol + self.rtol * abs(expected)
        close = (abs(actual - expected) <= bound) & (abs(expected) < float("inf"))
        bad = ~((actual == expected) | close)
        if not bad.any():
            return ""
        got, want = float(actual[bad][0]), float(expected[bad][0])
        return (
            f"{int(bad.sum())} of {math.prod(bad.shape)} elements differ, the first is {got:.9g}, "
            f"expected {want:.9g} (atol={self.atol:g}, rtol={self.rtol:g}: {self.reason})"
        )


def _once_rounded(atol: float, reason: str) -> dict[str, Tolerance]:
    rtol = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
    return {dtype: Tolerance(atol, rtol[dtype], f"{reason}, then one rounding") for dtype in rtol}


_COPIED = Tolerance(0.0, 0.0, "bytes are copied")
_CODES = Tolerance(
    2e-2,
    6e-3,
    "queries may be rounded to 8 bits of the largest sum of eight channels (C++), an error of up to 0.6 % of the "
    "largest scores of random queries",
)
_PREDICTED = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 sums over the hidden size in another order"),
    "bfloat16": Tolerance(2**-5, 2**-6, "up to two roundings to 8 bits in norm, product, rotation"),
    "float16": Tolerance(2**-8, 2**-9, "up to two roundings to 11 bits in norm, product, rotation"),
}
_SUMS = "fp32 sums of up to 256 products in another order"
TOLERANCES: dict[str, Tolerance | dict[str, Tolerance]] = {
    "add_norm": _PREDICTED,
    "append_tokens": Tolerance(0.0, 0.0, "one rounding to the dtype of the pages, to nearest even"),
    # Whatever the dtypes, q, K and V are multiplied with fp32 accuracy, but for softmax weights: see the op.
    "attend_pages": Tolerance(1e-5, 1e-5, "products summed in another order; exp within a few ulp"),
    "build_layer_digests": Tolerance(0.0, 0.0, "a minimum is one of the inputs"),
    "build_layer_means": _once_rounded(1e-5, "fp32 sums over a page in another order"),
    "build_layer_pilots": _once_rounded(2e-4, "fp32 sums of up to 512 products in another order"),
    "build_layer_rotated": Tolerance(0.0, 0.0, "by what is stored: see the tests of building"),
    "copy_layer_pages": _COPIED,
    "copy_tokens": _COPIED,
    "decay_mass": Tolerance(1e-5, 1e-5, f"e^(s - lse) of {_SUMS}"),
    "mass_change_rotated": _CODES,
    "merge_states": Tolerance(
        2e-6, 2e-6, "one sigmoid, whose parts a device approximates, one sum"
    ),
    "rotate_heads": _PREDICTED,
    "score_embeddings": Tolerance(5e-5, 2e-5, _SUMS),
    "score_pages": Tolerance(2e-5, 2e-5, f"{_SUMS}, then exp or log"),
    "score_rotated": _CODES,
    "select_pages": Tolerance(0.0, 0.0, "ids; sets may differ only between equal scores"),
    "stage_pages": _COPIED,
}
"""By op, and where it differs by the dtype of K and V, or of the result."""


def tolerance_of(op: Callable[..., Any], dtype: object = "float32") -> Tolerance:
    """Of an op or its reference; ``dtype`` of torch, or its name."""
    found = TOLERANCES[op.__name__.removesuffix("_reference")]
    return found if isinstance(found, Tolerance) else found[str(dtype).removeprefix("torch.")]
