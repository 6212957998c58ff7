"""Tolerances of an op's implementations, and which of them have run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

# Per op the names in order of first use; dicts, because two threads may insert at once.
_chosen: dict[str, dict[str, None]] = {}


class Tolerance(NamedTuple):
    """Allowed deviation of an implementation from the reference: ``|a - e| <= atol + rtol * |e|``.

    ``reason`` justifies the two numbers. A NaN never passes; infinities must be equal.
    """

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
        n_bad = int(bad.sum())
        if n_bad == 0:
            return ""
        got, want = actual[bad][0], expected[bad][0]
        return (
            f"{n_bad} of {bad.reshape(-1).shape[0]} elements differ, the first is "
            f"{float(got):.9g}, expected {float(want):.9g} "
            f"(atol={self.atol:g}, rtol={self.rtol:g}: {self.reason})"
        )


def note_choice(op: str, name: str, refused: Sequence[str]) -> None:
    """Log, once each, that ``op`` runs as ``name``, and why preferred ones cannot."""
    names = _chosen.setdefault(op, {})
    if name not in names:
        names[name] = None
        because = f" ({'; '.join(refused)})" if refused else ""
        logger.info("op %s runs as %s%s", op, name, because)


def chosen() -> dict[str, str]:
    """The implementations used so far per op: {"attend_pages": "native"}.

    An op that ran as several implementations (inputs differ) shows all in order of first use, joined by "+", so that an
    occasional slow path is not hidden by the last choice.
    """
    return {name: "+".join(names) for name, names in list(_chosen.items())}
