"""Instructions that each thread computes by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import Machine, dtype_of
from .program import Instruction, Name, Vector, bits_of

ROUNDING = {"rn", "rz", "rm", "rp", "rna", "rzi", "rpi", "rni", "rmi"}
_KNOWN = {  # beside the type; ftz is not modelled, what is denormal stays
    "add": {"rn", "ftz"},
    "sub": {"rn", "ftz"},
    "mul": {"rn", "ftz", "lo", "wide"},
    "mad": {"lo", "wide"},
    "fma": {"rn", "ftz"},
    "div": {"rn", "full", "ftz"},
    "min": {"ftz", "NaN"},
    "max": {"ftz", "NaN"},
    "cvt": ROUNDING | {"ftz"},
    "setp": {"ftz"},
    **{name: {"approx", "rn", "ftz"} for name in ("ex2", "lg2", "sqrt", "rsqrt", "rcp")},
    **{name: {"ftz"} for name in ("abs", "neg")},
}


def kind_of(instruction: Instruction) -> str:
    """Its type; refuses what changes an instruction and is not known here."""
    if set(instruction.modifiers[:-1]) - _KNOWN.get(instruction.opcode, set()):
        raise NotImplementedError(f"PTX instruction: {instruction}")
    return instruction.modifiers[-1]


def to_bf16(value: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16, to nearest even."""
    bits = value.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32, rounded once but for a double rounding of one in 2^29."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _shift_left(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    width = a.dtype.itemsize * 8
    shifted = a << np.minimum(by, width - 1).astype(a.dtype)
    return np.where(by >= width, a.dtype.type(0), shifted)


def _shift_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    width = a.dtype.itemsize * 8
    shifted = a >> np.minimum(by, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by >= width, a.dtype.type(0), shifted)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers towards 0; what divides by 0 is whatever, as on a device."""
    if a.dtype.kind == "f":
        return a / b
    b = np.where(b == 0, b.dtype.type(1), b)
    whole = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -whole, whole).astype(a.dtype)


_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "div": _quotient,
    # Of a number and NaN the number, as in PTX.
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
}
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "neg": np.negative,
    "not": np.invert,
    "popc": np.bitwise_count,
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(np.float32),
    "sqrt": np.sqrt,
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32),
    "rcp": lambda a: (1 / a.astype(np.float64)).astype(np.float32),
}
_COMPARED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_NEGATED = {"neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}  # or NaN


def binary(m: Machine, i: Instruction) -> None:
    kind, (out, a, b) = kind_of(i), i.operands
    if kind == "bf16x2":
        halves = []
        for shift in (0, 16):
            x, y = (
                m.read(o, "b32") >> np.uint32(shift) << np.uint32(16) for o in (a, b)
            )  # as float32
            halves.append(to_bf16(_BINARY[i.opcode](x.view(np.float32), y.view(np.float32))))
        m.write(out, halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16))
        return
    x, y = m.read(a, kind), m.read(b, kind)
    value = _BINARY[i.opcode](x, y)
    if "NaN" in i.modifiers:
        value = np.where((x != x) | (y != y), x.dtype.type(np.nan), value)
    m.write(out, value)


def unary(m: Machine, i: Instruction) -> None:
    out, a = i.operands
    value = _UNARY[i.opcode](m.read(a, kind_of(i)))
    m.write(out, value.astype(np.uint32) if i.opcode == "popc" else value)


def shift(m: Machine, i: Instruction) -> None:
    out, a, by = i.operands
    amount = m.read(by, "b32")
    m.write(
        out, (_shift_left if i.opcode == "shl" else _shift_right)(m.read(a, kind_of(i)), amount)
    )


def multiply(m: Machine, i: Instruction) -> None:
    """mul, mad and fma; of integers the low half, or all of it (wide)."""
    kind, (out, a, b, *c) = kind_of(i), i.operands
    x, y = m.read(a, kind), m.read(b, kind)
    if kind == "f32":
        product = fused(x, y, m.read(c[0], kind)) if c else x * y
    elif "wide" in i.modifiers:
        wide = f"{kind[0]}{2 * bits_of(kind)}"
        product = x.astype(dtype_of(wide)) * y.astype(dtype_of(wide))
        product = product + m.read(c[0], wide) if c else product
    elif "lo" in i.modifiers:
        product = x * y + m.read(c[0], kind) if c else x * y
    else:
        raise NotImplementedError(f"PTX instruction: {i}")
    m.write(out, product)


def compare(m: Machine, i: Instruction) -> None:
    (how, kind), (out, a, b) = i.modifiers[-2:], i.operands
    if len(i.modifiers) > 2 and set(i.modifiers[:-2]) - {"ftz"}:
        raise NotImplementedError(f"PTX instruction: {i}")
    x, y = m.read(a, kind), m.read(b, kind)
    if how in ("num", "nan"):
        either = np.isnan(x) | np.isnan(y)
        m.write(out, either if how == "nan" else ~either)
    elif how == "ne":
        m.write(out, np.not_equal(x, y) & ((x == x) & (y == y)))
    elif how in _NEGATED:
        m.write(out, ~_COMPARED[_NEGATED[how]](x, y))
    else:
        m.write(out, _COMPARED[how](x, y))


def select(m: Machine, i: Instruction) -> None:
    kind, (out, a, b, chosen) = kind_of(i), i.operands
    m.write(out, np.where(m.read(chosen, "pred"), m.read(a, kind), m.read(b, kind)))


def extract(m: Machine, i: Instruction) -> None:
    """bfe: ``length`` bits from ``first``; a signed one is extended by its highest bit."""
    kind, (out, a, first, length) = kind_of(i), i.operands
    width = bits_of(kind)
    value = m.read(a, f"u{width}").astype(np.uint64)
    first, length = (m.read(x, "u32").astype(np.uint64) & np.uint64(255) for x in (first, length))
    if (first + length > width).any() or (length == 0).any() or (length > 63).any():
        raise NotImplementedError(f"PTX instruction: {i}")
    field = (value >> first) & ((np.uint64(1) << length) - np.uint64(1))
    if kind[0] == "s":
        top = np.uint64(1) << (length - np.uint64(1))
        field = (field ^ top).astype(np.int64) - top.astype(np.int64)
    m.write(out, field.astype(dtype_of(kind)))


def permute(m: Machine, i: Instruction) -> None:
    """prmt: four bytes of eight, each or its sign."""
    kind_of(i)
    out, a, b, selector = i.operands
    source = m.read(a, "b32").astype(np.uint64) | m.read(b, "b32").astype(np.uint64) << np.uint64(
        32
    )
    chosen, value = m.read(selector, "b32").astype(np.uint64), np.zeros(m.lanes, np.uint64)
    for place in range(4):
        nibble = chosen >> np.uint64(4 * place) & np.uint64(15)
        byte = source >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        value |= np.where(nibble >= 8, sign, byte) << np.uint64(8 * place)
    m.write(out, value.astype(np.uint32))


def move(m: Machine, i: Instruction) -> None:
    kind, (out, a) = kind_of(i), i.operands
    if isinstance(out, Vector):
        width = bits_of(kind) // len(out.parts)
        value = m.read(a, kind)
        for place, part in enumerate(out.parts):
            if not (isinstance(part, Name) and part.name == "_"):
                piece = value >> value.dtype.type(width * place)
                m.write(part, piece.astype(dtype_of(f"b{width}")))
    elif isinstance(a, Vector):
        width, whole = bits_of(kind) // len(a.parts), dtype_of(kind)
        value = np.zeros(m.lanes, whole)
        for place, part in enumerate(a.parts):
            value |= m.read(part, f"b{width}").astype(whole) << whole(width * place)
        m.write(out, value)
    else:
        m.write(out, m.read(a, kind))


def _halved(value: np.ndarray, to: str) -> np.ndarray:
    return to_bf16(value) if to == "bf16x2" else value.astype(np.float16).view(np.uint16)


def convert(m: Machine, i: Instruction) -> None:
    *how, to, source = i.modifiers
    if set(how) - _KNOWN["cvt"]:
        raise NotImplementedError(f"PTX instruction: {i}")
    rounding, out = set(how) & ROUNDING, i.operands[0]
    value = m.read(i.operands[1], source)
    if to in ("bf16x2", "f16x2") and source == "f32" and rounding == {"rn"}:
        high, low = (_halved(m.read(x, source), to).astype(np.uint32) for x in i.operands[1:])
        m.write(out, high << np.uint32(16) | low)
    elif to == "bf16" and source == "f32" and rounding == {"rn"}:
        m.write(out, to_bf16(value))
    elif to == "tf32" and rounding == {"rna"}:
        bits = value.view(np.uint32)
        m.write(out, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000))
    elif source[0] == "f" and to[0] in "su" and rounding & {"rzi", "rpi", "rni", "rmi"}:
        whole = {"rzi": np.trunc, "rpi": np.ceil, "rni": np.rint, "rmi": np.floor}
        limits = np.iinfo(dtype_of(to))
        value = np.nan_to_num(whole[rounding.pop()](value.astype(np.float64)), nan=0.0)
        m.write(out, np.clip(value, limits.min, limits.max).astype(dtype_of(to)))
    elif source == to == "f32" and rounding == {"rpi"}:
        m.write(out, np.ceil(value))
    elif to == "f32" and source in ("bf16", "f16"):
        m.write(out, value.astype(np.float32))
    elif to in ("f16", "f32") and rounding == {"rn"}:
        m.write(out, value.astype(dtype_of(to)))
    elif source[0] in "su" and to[0] in "su" and not rounding:
        m.write(out, value.astype(dtype_of(to)))
    else:
        raise NotImplementedError(f"PTX instruction: {i}")


HANDLERS = {
    **dict.fromkeys(_BINARY, binary),
    **dict.fromkeys(_UNARY, unary),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("mul", "mad", "fma"), multiply),
    "setp": compare,
    "selp": select,
    "bfe": extract,
    "prmt": permute,
    "mov": move,
    "cvt": convert,
}
