"""How far an implementation of an op may be from its reference, and why: for tests and benchmarks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .layers import KV_DTYPE_NAMES


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


_COPIED = 0.0, 0.0, "bytes are copied"
_CODES = (
    2e-2,
    6e-3,
    "queries may be rounded to 8 bits of the largest sum of eight channels (C++), an error of up to 0.6 % of the "
    "largest scores of random queries",
)
_OF_EVERY_DTYPE = {
    "append_tokens": (0.0, 0.0, "one rounding to the dtype of the pages, to the nearest even"),
    # Whatever the dtypes, q, K and V are multiplied with fp32 accuracy, but for softmax weights: see the op.
    "attend_pages": (1e-5, 1e-5, "same products, summed in another order; exp within a few ulp"),
    "build_layer_digests": (0.0, 0.0, "a minimum is one of the inputs: nothing is rounded"),
    "build_layer_rotated": (0.0, 0.0, "compared by what is stored: see the tests of building"),
    "copy_layer_pages": _COPIED,
    "copy_tokens": _COPIED,
    "mass_change_rotated": _CODES,
    "merge_states": (
        2e-6,
        2e-6,
        "one sigmoid, whose exp and division a device approximates, one sum",
    ),
    "score_pages": (
        2e-5,
        2e-5,
        "fp32 sums of up to 256 products in another order, then exp or log",
    ),
    "score_rotated": _CODES,
    "select_pages": (0.0, 0.0, "ids, not values; sets may differ only between equal scores"),
    "stage_pages": _COPIED,
}
_PREDICTED = {
    "float32": Tolerance(2e-5, 2e-5, "fp32 sums over the hidden size in another order"),
    "bfloat16": Tolerance(2**-5, 2**-6, "up to two roundings to 8 bits in norm, product, rotation"),
    "float16": Tolerance(2**-8, 2**-9, "up to two roundings to 11 bits in norm, product, rotation"),
}


def of_every_dtype(atol: float, rtol: float, reason: str) -> dict[str, Tolerance]:
    return dict.fromkeys(KV_DTYPE_NAMES, Tolerance(atol, rtol, reason))


def once_rounded(atol: float, reason: str) -> dict[str, Tolerance]:
    rtol = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
    return {dtype: Tolerance(atol, rtol[dtype], f"{reason}, then one rounding") for dtype in rtol}


TOLERANCES: dict[str, dict[str, Tolerance]] = {
    **{op: of_every_dtype(*x) for op, x in _OF_EVERY_DTYPE.items()},
    "add_norm": _PREDICTED,
    "rotate_heads": _PREDICTED,
}
"""By op and the name of a dtype: of K and V, or of the result."""


def tolerances(op: Callable[..., Any]) -> dict[str, Tolerance]:
    """Of an op or its reference; those of policies are in the ops' modules."""
    of_module = getattr(sys.modules[op.__module__], "TOLERANCES", TOLERANCES)
    found: dict[str, Tolerance] = of_module[op.__name__.removesuffix("_reference")]
    return found
