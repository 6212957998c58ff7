"""One op, several implementations: who runs, who refuses and why.

An :class:`Op` holds a reference (the oracle, always able to run) and implementations in order of
preference. Each implementation answers ``reasons(*args, **kwargs)``: an empty list, or every reason
why it cannot take these inputs. ``impl="auto"`` takes the first without a reason; an implementation
asked for by name never falls back. One that can run but should not unless asked for says so in
``auto_reasons``, which only "auto" heeds. Nothing here knows tensors: shapes and dtypes are only
printed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import ImplementationError

logger = logging.getLogger(__name__)

REFERENCE = "reference"

# Per op the names in order of first use; dicts, because two threads may announce at once.
_chosen: dict[str, dict[str, None]] = {}


class Tolerance(NamedTuple):
    """How far an implementation may be from the reference: ``|a - e| <= atol + rtol * |e|``.

    ``reason`` says where the two numbers come from. A NaN never passes; infinities must be equal.
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


def no_reasons(*_args: Any, **_kwargs: Any) -> list[str]:
    """For an implementation that takes whatever the op's check lets through."""
    return []


@dataclass(frozen=True)
class Implementation:
    """A way to run an op. All three callables take the same arguments as the reference."""

    name: str
    run: Callable[..., Any]
    reasons: Callable[..., list[str]] = no_reasons
    auto_reasons: Callable[..., list[str]] = no_reasons


class Op:
    """An op: its reference and the implementations beside it, the preferred one first.

    Args:
        name: what errors, logs and status show.
        reference: the oracle; also the implementation "reference", which ends every list.
        implementations: tried in this order by ``impl="auto"``.
        check: called with the arguments before any implementation; raises ValueError naming the op
            and the argument. It makes every implementation refuse the same malformed inputs.
        tolerances: per dtype name ("float32", "bfloat16", "float16"), see :class:`Tolerance`.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        implementations: Sequence[Implementation] = (),
        *,
        check: Callable[..., None] | None = None,
        tolerances: Mapping[str, Tolerance] | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self.check = check
        self.tolerances = dict(tolerances or {})
        self.implementations: list[Implementation] = [Implementation(REFERENCE, reference)]
        for implementation in implementations:
            self.register(implementation)

    def register(self, implementation: Implementation, *, first: bool = False) -> None:
        """Add an implementation, behind the others but before the reference, or before all."""
        if implementation.name in self.names() or implementation.name == "auto":
            raise ValueError(f"{self.name}: implementation {implementation.name!r} exists already")
        position = 0 if first else len(self.implementations) - 1
        self.implementations.insert(position, implementation)

    def names(self) -> list[str]:
        return [implementation.name for implementation in self.implementations]

    def reasons(self, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Every implementation's reasons against these inputs (empty list: it can run)."""
        return {i.name: i.reasons(*args, **kwargs) for i in self.implementations}

    def __call__(self, *args: Any, impl: str = "auto", **kwargs: Any) -> Any:
        """Run with the first able implementation, or with the named one.

        Raises:
            ValueError: malformed arguments (from ``check``).
            ImplementationError: unknown implementation, or the named one has reasons not to run.
        """
        if self.check is not None:
            self.check(*args, **kwargs)
        refused: list[str] = []
        for implementation in self.implementations:
            if impl not in ("auto", implementation.name):
                continue
            reasons = implementation.auto_reasons(*args, **kwargs) if impl == "auto" else []
            reasons = reasons or implementation.reasons(*args, **kwargs)
            if not reasons:
                if implementation.name not in _chosen.get(self.name, ()):
                    self._announce(implementation.name, refused)
                return implementation.run(*args, **kwargs)
            refused.extend(f"{implementation.name}: {reason}" for reason in reasons)
        if not refused:
            refused = [f"there is none of that name; known: auto, {', '.join(self.names())}"]
        raise ImplementationError(
            f"{self.name}: implementation {impl!r} cannot run: {'; '.join(refused)}. "
            f"Inputs: {describe(*args, **kwargs)}"
        )

    def _announce(self, name: str, refused: Sequence[str]) -> None:
        _chosen.setdefault(self.name, {})[name] = None
        because = f" ({'; '.join(refused)})" if refused else ""
        logger.info("op %s runs as %s%s", self.name, name, because)


def describe(*args: Any, **kwargs: Any) -> str:
    """Arguments on one line: dtype, shape and device of what has them, the value of the rest."""
    named = [(f"#{index}", value) for index, value in enumerate(args)] + list(kwargs.items())
    parts = []
    for name, value in named:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            dtype = str(value.dtype).removeprefix("torch.")
            device = f" {value.device}" if hasattr(value, "device") else ""
            parts.append(f"{name} {dtype}{list(value.shape)}{device}")
        elif isinstance(value, (tuple, list)):
            parts.append(f"{name} ({describe(*value)})")
        else:
            parts.append(f"{name}={value!r}")
    return ", ".join(parts)


def chosen() -> dict[str, str]:
    """What each op has run as so far: {"attend_pages": "native"}.

    An op that ran as several implementations (inputs differ) shows them all in order of first use,
    joined by "+", so that a slow path taken now and then cannot hide behind the last choice.
    """
    return {name: "+".join(names) for name, names in list(_chosen.items())}


def forget_chosen() -> None:
    """Start `chosen()` and the log-once memory anew."""
    _chosen.clear()
