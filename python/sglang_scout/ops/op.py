"""An op is a reference function, whose signature declares shapes and dtypes, and faster implementations of it.

    @op(tolerances=...)
    def score(
        q: Annotated[torch.Tensor, "B H*G D query"],
        k: Annotated[torch.Tensor, "P S H D kv"],
        first: Annotated[torch.Tensor | None, "B int32"] = None,
    ) -> torch.Tensor: ...

    @score.native(sizes={"D": range(16, 257, 16)})
    def _native(q, k, first): ...

    score.triton("module")

A spec is the names of a tensor's axes followed by its dtype. A name has one size throughout a call; a number is that
size. "H*G" is a product of which one factor may stand nowhere else (1 if the others are 0). "kv" is any dtype of K and
V, "any" any dtype, other names are float dtypes. A tuple has a spec for each element. The layers of `LayerPages` are an
extra leading axis. An integer whose spec is an axis name is the size of that axis. None is allowed where the annotation
says so.

A call runs C++ on CPU tensors and Triton on CUDA tensors, and the reference where these do not support it. What was
checked of a call's tensors is remembered: the next call with such tensors checks nothing.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, get_args, get_type_hints

import torch

from ..core.errors import ImplementationError
from .layers import KV_DTYPE_NAMES, LayerPages
from .triton import interpreted

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

AUTO, REFERENCE = "auto", "reference"
_KV = tuple(getattr(torch, name) for name in KV_DTYPE_NAMES)
_FLOATS = _KV[:3]
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {"kv": _KV, "any": ()}
_MOST_REMEMBERED = 4096  # calls of an op; the number of ids varies without end


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


class Call:
    """The arguments of one call, checked.

    Attributes:
        values: all arguments in order.
        sizes, dtypes: bound to the names in the specs.
        tensors: (name, tensor), including those within tuples and layers.
    """

    def __init__(self, op: Op[Any, Any], values: list[Any]) -> None:
        self._op, self.values = op, values
        self.sizes: dict[str, int] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._axes: list[tuple[str, str, int]] = []
        for name, spec in op.specs:
            if self[name] is not None or name not in op.optional:
                self._bind(name, self[name], spec)
        # Products after all factors that stand elsewhere.
        for name, axis, size in sorted(self._axes, key=lambda found: "*" in found[1]):
            self._bind_size(name, axis, size)

    def __getitem__(self, name: str) -> Any:
        return self.values[self._op.index[name]]

    def fail(self, what: str) -> NoReturn:
        raise ValueError(f"{self._op.name}: {what}")

    def _bind(self, name: str, value: Any, spec: Any) -> None:
        if isinstance(spec, tuple):
            parts = getattr(value, "_fields", range(len(value)))
            for part, element, of_element in zip(parts, value, spec, strict=True):
                self._bind(f"{name}.{part}", element, of_element)
        elif " " not in spec:
            self._axes.append((name, spec, value))
        elif isinstance(value, LayerPages):
            layers, rest = spec.split(maxsplit=1)
            self._axes.append((name, layers, len(value.k)))
            self._bind_tensor(f"{name}.k", value.k[0], rest)
            self.tensors.append((f"{name}.addresses", value.addresses))
        else:
            self._bind_tensor(name, value, spec)

    def _bind_tensor(self, name: str, tensor: Any, spec: str) -> None:
        *axes, dtype = spec.split()
        if not isinstance(tensor, torch.Tensor):
            self.fail(f"{name} is a {type(tensor).__name__}, expected a tensor [{', '.join(axes)}]")
        one = self.dtypes.get(dtype, getattr(torch, dtype, None))
        allowed = (one,) if isinstance(one, torch.dtype) else _DTYPES.get(dtype, _FLOATS)
        if allowed and tensor.dtype not in allowed:
            self.fail(f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
        self.dtypes[dtype] = tensor.dtype
        shape = tensor.shape
        if len(shape) != len(axes):
            self.fail(f"{name} has {len(shape)} axes {list(shape)}, expected [{', '.join(axes)}]")
        self._axes += [(name, *named) for named in zip(axes, shape, strict=True)]
        self.tensors.append((name, tensor))

    def _bind_size(self, name: str, axis: str, size: int) -> None:
        factors = {f: int(f) if f.isdigit() else self.sizes.get(f) for f in axis.split("*")}
        new = [factor for factor, known in factors.items() if known is None]
        product = math.prod(known for known in factors.values() if known is not None)
        if not new:
            if size != product:
                what = "an axis of " if axis.isdigit() else f"{axis}="
                self.fail(f"{name} has {what}{size}, expected {product}")
        elif len(factors) == 1:
            self.sizes[axis] = size
        elif (size == 0) != (product == 0) or (size and size % product):
            known = next(factor for factor in factors if factor not in new)
            self.fail(f"{name} has {axis}={size}, expected a multiple of {known}={product}")
        else:
            self.sizes[new[0]] = size // product if size else 1


@dataclass(frozen=True)
class Implementation:
    """An implementation of an op, and its restrictions beyond those of the op. It takes all arguments, in order.

    Attributes:
        device: "cpu" or "cuda".
        sizes: allowed sizes of axes, by name.
        strided_rows: tensors that need only contiguous rows; all others must be fully contiguous.
        on_host: tensors that may be in any host memory.
        unless: any other reason not to run such a call, or "".
    """

    name: str
    run: Callable[..., Any]
    device: str = "cpu"
    sizes: Mapping[str, range] = field(default_factory=dict)
    strided_rows: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ()
    unless: Callable[[Call], str] = lambda _call: ""

    def reaches(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it can access a tensor's memory. Kernels access pinned host memory too."""
        if self.device == "cpu" or tensor.is_cuda:
            return tensor.device.type == self.device
        of_host = name in self.on_host or (self.name == "triton" and interpreted())
        return tensor.device.type == "cpu" and (of_host or tensor.is_pinned())

    def reasons(self, call: Call) -> list[str]:
        """Reasons why it cannot run on such tensors; empty if it can."""
        found = [
            f"{name} is on {tensor.device}; {self.name} supports {self.device}"
            for name, tensor in call.tensors
            if not self.reaches(name, tensor)
        ][:1]
        for axis, sizes in self.sizes.items():
            if axis in call.sizes and call.sizes[axis] not in sizes:
                some = f"multiples of {sizes.step} " if sizes.step > 1 else ""
                limit = f"{self.name} supports {some}up to {sizes[-1]}"
                found.append(f"{axis}={call.sizes[axis]}; {limit}")
        for name, tensor in call.tensors:
            part = tensor[0] if name in self.strided_rows and len(tensor) else tensor
            if not part.is_contiguous():
                found.append(f"{name} is not contiguous, strides {tensor.stride()}")
        return found or [reason for reason in [self.unless(call)] if reason]


def _facts(value: Any) -> Any:
    """All of an argument that checks and reasons depend on."""
    if isinstance(value, torch.Tensor):
        pinned = not value.is_cuda and value.is_pinned()
        return value.shape, value.stride(), value.dtype, value.device, pinned
    if isinstance(value, (tuple, list)):
        return tuple(map(_facts, value))
    if isinstance(value, LayerPages):
        return len(value.k), _facts(value.k[0]), value.addresses.device
    return value if value.__hash__ else type(value)


class Op(Generic[P, R]):
    """An op: its reference, which is the oracle and always runs, and implementations, the preferred one first.

    Attributes:
        tolerances: by dtype name, like "float32".
        ran: names of the implementations that have run, in order of first use.
    """

    every: list[Op[Any, Any]] = []

    def __init__(
        self,
        reference: Callable[P, R],
        valid: Callable[[Call], str],
        tolerances: Mapping[str, Tolerance],
    ) -> None:
        parameters = inspect.signature(reference).parameters
        hints = get_type_hints(reference, include_extras=True)
        annotated = [(n, hints[n]) for n in parameters if hasattr(hints[n], "__metadata__")]
        self.name, self.__doc__ = reference.__name__, reference.__doc__
        self.reference, self.tolerances = reference, dict(tolerances)
        self.implementations: dict[str, Implementation] = {}
        self.ran: dict[str, None] = {}
        self.index = {name: i for i, name in enumerate(parameters)}
        self.specs = [(name, hint.__metadata__[0]) for name, hint in annotated]
        self.optional = {name for name, h in annotated if type(None) in get_args(h.__origin__)}
        self._defaults = [p.default for p in parameters.values()]
        self._valid = valid
        self._able: dict[Any, Implementation] = {}
        Op.every.append(self)

    def register(self, name: str, run: Callable[..., Any], **limits: Any) -> None:
        """Add an implementation after the others; ``limits`` as in `Implementation`."""
        self.implementations[name] = Implementation(name, run, **limits)
        self._able.clear()

    def native(self, **limits: Any) -> Callable[[Callable[..., Any]], None]:
        """Register the decorated function, which calls C++."""
        return lambda run: self.register("native", run, **limits)

    def triton(self, module: str, **limits: Any) -> None:
        """Register the function of ``ops/triton/<module>.py`` with the op's name; the first call imports it."""

        def run(*arguments: Any) -> Any:
            loaded = importlib.import_module(f".triton.{module}", __package__)
            return getattr(loaded, self.name)(*arguments)

        self.register("triton", run, device="cuda", **limits)

    def names(self) -> list[str]:
        return [*self.implementations, REFERENCE]

    def in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in positional order."""
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            values[self.index[name]] = value
        if len(values) != len(self.index) or any(v is inspect.Parameter.empty for v in values):
            raise TypeError(f"{self.name} takes {', '.join(self.index)}")
        return values

    def check(self, *args: Any, **kwargs: Any) -> Call:
        """Raises ValueError, naming op and argument, for malformed arguments."""
        call = Call(self, self.in_order(args, kwargs))
        if wrong := self._valid(call):
            call.fail(wrong)
        return call

    def reasons(self, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Every implementation's reasons not to run on these inputs; empty if it can."""
        call = self.check(*args, **kwargs)
        return {name: i.reasons(call) for name, i in self.implementations.items()}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run with the first able implementation of the tensors' device, or with the one named by ``impl``.

        Raises:
            ValueError: malformed arguments.
            ImplementationError: unknown implementation, or the named one has reasons not to run.
        """
        impl = kwargs.pop("impl", AUTO)
        values = self.in_order(args, kwargs)
        key = impl, *map(_facts, values)
        if (able := self._able.get(key)) is None:
            if len(self._able) == _MOST_REMEMBERED:
                self._able.clear()
            able = self._able[key] = self._find(impl, self.check(*values))
        self.ran.setdefault(able.name)
        result: R = able.run(*values)
        return result

    def _find(self, impl: Any, call: Call) -> Implementation:
        """What runs such calls; the first time it is logged, with the reasons of those before it."""
        gpus = {str(x.device) for _, x in call.tensors if x.is_cuda}
        if len(gpus) > 1:
            call.fail(f"tensors are on {' and '.join(sorted(gpus))}, expected one device")
        device, refused = "cuda" if gpus else "cpu", dict[str, list[str]]()
        for name, implementation in self.implementations.items():
            if impl in (AUTO, name):
                refused[name] = implementation.reasons(call)
                if not refused[name] and (impl == name or implementation.device == device):
                    break
        else:
            if impl not in (AUTO, REFERENCE):
                unknown = [f"unknown name; known are auto, {', '.join(self.names())}"]
                inputs = (f"{name} {x.dtype}{list(x.shape)} {x.device}" for name, x in call.tensors)
                raise ImplementationError(
                    f"{self.name}: implementation {impl!r} cannot run: "
                    f"{'; '.join(refused.get(impl, unknown))}. Inputs: {', '.join(inputs)}"
                )
            implementation = Implementation(REFERENCE, self.reference)
        if implementation.name not in self.ran:
            why = "; ".join(f"{name}: {each}" for name, x in refused.items() for each in x)
            logger.info("op %s runs as %s%s", self.name, implementation.name, why and f" ({why})")
        return implementation


def op(
    valid: Callable[[Call], str] = lambda _call: "", *, tolerances: Mapping[str, Tolerance]
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a reference function into an op. ``valid`` checks what specs cannot express; it returns the error, or ""."""
    return lambda reference: Op(reference, valid, tolerances)


def chosen() -> dict[str, str]:
    """The implementations used so far per op, in order of first use: {"attend_pages": "native+reference"}."""
    return {op.name: "+".join(op.ran) for op in Op.every if op.ran}
