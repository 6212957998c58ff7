"""An op is its reference function plus declarative specs of its arguments and of what each implementation supports.

    @op(k="P S H D kv", q="B H*G D float32", ids="B N int32", out="B N float32")
    def score(q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None): ...

    score.register(Implementation("native", function, sizes={"D": range(16, 257, 16)}))

A spec is the names of a tensor's axes followed by its dtype. An axis or dtype name is bound at its first occurrence,
in the order of the specs, and must match everywhere else. "H*G" is a product of which one factor may be new (1 if
the others are 0, as for an empty batch), "..." stands for all remaining axes. A tuple has a spec for each element.
The layers of `LayerPages` are an extra leading axis. An integer whose spec is an axis name is the size of that axis,
and a list holds all allowed values. None is allowed where the annotation says so.

Implementations take all arguments of the reference, in its order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch

from ..core.errors import ImplementationError
from ..core.registry import Tolerance, note_choice
from .layers import LayerPages

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[tuple[str, torch.Tensor]]

REFERENCE = "reference"
_REST = "..."


class _Tensor(NamedTuple):
    axes: tuple[str, ...]
    dtype: torch.dtype | str


def _parsed(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return tuple(_parsed(part) for part in spec)
    if isinstance(spec, list) or " " not in spec:
        return spec
    *axes, name = spec.split()
    dtype = getattr(torch, name, None)
    return _Tensor(tuple(axes), dtype if isinstance(dtype, torch.dtype) else name)


class Call:
    """The arguments of one call, checked.

    Attributes:
        values: all arguments in order.
        sizes, dtypes: values bound to the names in the specs.
        tensors: (name, tensor), including those within tuples and layers.
    """

    __slots__ = ("_op", "dtypes", "sizes", "tensors", "values")

    def __init__(self, op: Op[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._op = op
        self.values = op.in_order(args, kwargs)
        self.sizes: dict[str, Any] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        for name, spec in op.specs:
            self._bind(name, self[name], spec)

    def __getitem__(self, name: str) -> Any:
        return self.values[self._op.index[name]]

    def fail(self, what: str) -> NoReturn:
        raise ValueError(f"{self._op.name}: {what}")

    def _bind(self, name: str, value: Any, spec: Any) -> None:
        if value is None and name in self._op.optional:
            return
        if isinstance(spec, _Tensor):
            if isinstance(value, LayerPages):
                self._bind_size(name, spec.axes[0], len(value.k))
                self._bind_tensor(f"{name}.k", value.k[0], spec.axes[1:], spec.dtype)
                self.tensors.append((f"{name}.addresses", value.addresses))
            else:
                self._bind_tensor(name, value, *spec)
        elif isinstance(spec, tuple):
            parts = getattr(value, "_fields", None)
            for i, (part, of_part) in enumerate(zip(value, spec, strict=True)):
                self._bind(f"{name}.{parts[i]}" if parts else f"{name}[{i}]", part, of_part)
        elif isinstance(spec, list):
            if value not in spec:
                self.fail(f"{name} is {value!r}, expected one of {', '.join(spec)}")
        else:
            self.sizes[spec] = value

    def _bind_tensor(
        self, name: str, tensor: Any, axes: tuple[str, ...], dtype: torch.dtype | str
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            self.fail(f"{name} is a {type(tensor).__name__}, expected a tensor [{', '.join(axes)}]")
        if isinstance(dtype, str):
            dtype = self.dtypes.setdefault(dtype, tensor.dtype)
        if tensor.dtype != dtype:
            self.fail(f"{name} has dtype {tensor.dtype}, expected {dtype}")
        shape: Sequence[Any] = tensor.shape
        if axes[-1] == _REST and len(shape) >= len(axes) - 1:
            shape = [*shape[: len(axes) - 1], list(shape[len(axes) - 1 :])]
        if len(shape) != len(axes):
            self.fail(f"{name} has {len(shape)} axes {list(shape)}, expected [{', '.join(axes)}]")
        for axis, size in zip(axes, shape, strict=True):
            self._bind_size(name, axis, size)
        self.tensors.append((name, tensor))

    def _bind_size(self, name: str, axis: str, size: Any) -> None:
        if "*" in axis and axis not in self.sizes:
            known, product = [], 1
            for factor in axis.split("*"):
                if factor in self.sizes:
                    known.append(factor)
                    product *= self.sizes[factor]
                else:
                    new = factor
            if len(known) > axis.count("*"):
                self.sizes[axis] = product
            elif size == product == 0:
                self.sizes[new] = 1
            elif size == 0 or product == 0 or size % product:
                self.fail(f"{name} has {axis}={size}, expected a multiple of {known[0]}={product}")
            else:
                self.sizes[new] = size // product
        if (expected := self.sizes.setdefault(axis, size)) != size:
            self.fail(f"{name} has {axis}={size}, expected {expected}")


@dataclass(frozen=True)
class Implementation:
    """An implementation of an op, and its restrictions beyond those of the op.

    Attributes:
        devices: reasons not to run on the devices of the call's tensors.
        dtypes: allowed for the dtypes that have a name in the specs; None: any.
        sizes: allowed sizes of axes, by name.
        strided_rows: tensors that need only contiguous rows; all others must be fully contiguous.
        unless: any other reason not to run, or ""; only called if there is none so far.
        unasked: reason not to run unless asked for by name.
    """

    name: str
    run: Callable[..., Any]
    devices: Callable[[Tensors], list[str]] = lambda _tensors: []
    dtypes: tuple[torch.dtype, ...] | None = None
    sizes: Mapping[str, range] = field(default_factory=dict)
    strided_rows: tuple[str, ...] = ()
    unless: Callable[[Call], str] = lambda _call: ""
    unasked: Callable[[], str] = lambda: ""

    def reasons(self, call: Call) -> list[str]:
        """Every reason why it cannot run; empty if it can, as always for the reference."""
        if self.name == REFERENCE:
            return []
        found = self.devices(call.tensors)
        for dtype in dict.fromkeys(call.dtypes.values()) if self.dtypes is not None else ():
            if dtype not in self.dtypes:
                takes = ", ".join(str(x).removeprefix("torch.") for x in self.dtypes)
                found.append(f"dtype {dtype}; {self.name} supports {takes}")
        for axis, sizes in self.sizes.items():
            if axis in call.sizes and call.sizes[axis] not in sizes:
                which = f"multiples of {sizes.step} " if sizes.step > 1 else ""
                found.append(
                    f"{axis}={call.sizes[axis]}; {self.name} supports {which}up to {sizes[-1]}"
                )
        for name, tensor in call.tensors:
            part = tensor[0] if name in self.strided_rows and len(tensor) else tensor
            if not part.is_contiguous():
                found.append(f"{name} is not contiguous, strides {tensor.stride()}")
        if not found and (reason := self.unless(call)):
            found.append(reason)
        return found


class Op(Generic[P, R]):
    """An op: its reference, which is the oracle and always runs, and implementations, the preferred one first.

    Attributes:
        tolerances: per dtype name ("float32", "bfloat16", "float16"), see :class:`Tolerance`.
        preferred: the default ``impl``.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        specs: Mapping[str, Any],
        valid: Callable[[Call], str],
        tolerances: Mapping[str, Tolerance],
    ) -> None:
        parameters = inspect.signature(reference).parameters
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.tolerances = dict(tolerances)
        self.preferred = "auto"
        self.implementations = [Implementation(REFERENCE, reference)]
        self.index = {name: i for i, name in enumerate(parameters)}
        self.optional = {name for name, p in parameters.items() if "None" in str(p.annotation)}
        self.specs = [(name, _parsed(spec)) for name, spec in specs.items()]
        self._defaults = [p.default for p in parameters.values()]
        self._valid = valid

    def register(self, implementation: Implementation) -> None:
        """Add an implementation after the others but before the reference."""
        self.implementations.insert(-1, implementation)

    def names(self) -> list[str]:
        return [implementation.name for implementation in self.implementations]

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in positional order."""
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            values[self.index[name]] = value
        if len(values) != len(self.index) or any(v is inspect.Parameter.empty for v in values):
            raise TypeError(f"{self.name} takes {', '.join(self.index)}")
        return values

    def check(self, *args: Any, **kwargs: Any) -> Call:
        """Raises ValueError, naming op and argument, for malformed arguments."""
        call = Call(self, args, kwargs)
        if wrong := self._valid(call):
            call.fail(wrong)
        return call

    def reasons(self, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Every implementation's reasons not to run on these inputs (empty list: it can run)."""
        call = self.check(*args, **kwargs)
        return {i.name: i.reasons(call) for i in self.implementations}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run with the first able implementation, or with the one named by ``impl``.

        Raises:
            ValueError: malformed arguments.
            ImplementationError: unknown implementation, or the named one has reasons not to run.
        """
        impl = kwargs.pop("impl", self.preferred)
        call = self.check(*args, **kwargs)
        refused: list[str] = []
        for implementation in self.implementations:
            if impl not in ("auto", implementation.name):
                continue
            unasked = implementation.unasked() if impl == "auto" else ""
            reasons = [unasked] if unasked else implementation.reasons(call)
            if not reasons:
                note_choice(self.name, implementation.name, refused)
                result: R = implementation.run(*call.values)
                return result
            refused.extend(f"{implementation.name}: {reason}" for reason in reasons)
        if not refused:
            refused = [f"unknown name; known are auto, {', '.join(self.names())}"]
        inputs = ", ".join(
            f"{name} {x.dtype}{list(x.shape)} {x.device}" for name, x in call.tensors
        )
        raise ImplementationError(
            f"{self.name}: implementation {impl!r} cannot run: {'; '.join(refused)}. Inputs: {inputs}"
        )


def op(
    valid: Callable[[Call], str] = lambda _call: "",
    *,
    tolerances: Mapping[str, Tolerance],
    **specs: Any,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a reference function into an op.

    Args:
        valid: checks that specs cannot express; returns the error, or "".
        specs: of the arguments by name; those without one are not checked.
    """
    return lambda reference: Op(reference, specs, valid, tolerances)
