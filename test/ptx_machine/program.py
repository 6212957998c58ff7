"""PTX text to instructions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field


def bits_of(kind: str) -> int:
    """Bits of a PTX type; 1 for a predicate."""
    if kind == "pred":
        return 1
    pair = kind.endswith("x2")
    return int(kind.lstrip("busf").removesuffix("x2")) * (2 if pair else 1)


@dataclass(frozen=True)
class Register:
    name: str
    bits: int  # 1: a predicate


@dataclass(frozen=True)
class Immediate:
    bits: int  # of a float: its pattern; of an integer: its value, maybe negative


@dataclass(frozen=True)
class Special:
    """%tid.x and its like, or the start of shared memory."""

    name: str


@dataclass(frozen=True)
class Vector:
    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


@dataclass(frozen=True)
class Name:
    """A label or a parameter."""

    name: str


Operand = Register | Immediate | Special | Vector | Address | Name


@dataclass(frozen=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str
    source: str  # file:line of the kernel

    def __str__(self) -> str:
        return f"{self.text}  ({self.source})"


@dataclass
class Program:
    name: str = ""
    parameters: list[tuple[str, str]] = field(default_factory=list)  # name, type
    threads: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_LOCATION = re.compile(r"\.loc\s+\d+ (\d+) \d+.*?//\s*([\w.]+):\d+")
_GUARD = re.compile(r"@(!?)([%\w]+)\s+")
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%globaltimer$")


class _Body:
    """Instructions of one function; names declared between braces are those of that block alone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._scopes: list[dict[str, Register]] = []
        self._ranges: dict[str, int] = {}  # "%r": 32
        self._blocks = 0
        self.source = "?"

    def open(self) -> None:
        self._scopes.append({})
        self._blocks += 1

    def close(self) -> None:
        self._scopes.pop()

    def declare(self, text: str) -> None:
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()
        for name in re.split(r"\s*,\s*", names.strip()):
            ranged = re.fullmatch(r"(%?\w+?)<(\d+)>", name)
            if ranged and name.startswith("%"):
                self._ranges[ranged[1]] = bits_of(kind)
                continue
            for one in [f"{ranged[1]}{n}" for n in range(int(ranged[2]))] if ranged else [name]:
                self._scopes[-1][one] = Register(f"{one}@{self._blocks}", bits_of(kind))

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self.operand(part) for part in text[1:-1].split(",")))
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return Address(self.operand(base), int(offset, 0) if offset else 0)
        for scope in reversed(self._scopes):
            if text in scope:
                return scope[text]
        if _SPECIAL.match(text) or text == "global_smem":
            return Special(text)
        if text.startswith("%"):
            return Register(text, self._ranges[text.rstrip("0123456789")])
        if text.startswith("0f"):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", text):
            return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0])
        return Name(text)

    def statement(self, text: str) -> None:
        text = " ".join(text.split())
        if text.startswith(".reg"):
            return self.declare(text)
        if text.startswith("."):
            raise NotImplementedError(f"PTX directive: {text}")
        guard = _GUARD.match(text)
        rest = text[guard.end() :] if guard else text
        opcode, _, operands = rest.partition(" ")
        opcode, *modifiers = opcode.split(".")
        # Commas between braces or brackets do not end an operand.
        parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", operands)
        self._program.instructions.append(
            Instruction(
                opcode,
                tuple(modifiers),
                tuple(self.operand(p) for p in parts if p.strip()),
                self.operand(guard[2]) if guard else None,
                bool(guard and guard[1]),
                text,
                self.source,
            )
        )
        return None


def parse(ptx: str) -> Program:
    """The one kernel of ``ptx``."""
    program = Program()
    head, _, text = ptx.partition(".visible .entry ")
    program.name, _, text = text.partition("(")
    parameters, _, text = text.partition(")")
    for line in filter(None, (line.strip(" ,\n\t") for line in parameters.split("\n"))):
        words = line.split()
        program.parameters.append((words[-1], words[1].lstrip(".")))
    directives, _, text = text.partition("{")
    program.threads = int(re.search(r"\.reqntid (\d+)", directives)[1])
    body = _Body(program)
    body.open()
    pending = ""
    for line in text.split("\n"):
        located = _LOCATION.search(line)
        if located:
            body.source = f"{located[2]}:{located[1]}"
        if line.lstrip().startswith(".loc"):
            continue
        pending += line.partition("//")[0] + " "
        while pending := pending.lstrip():
            label = re.match(r"([$\w]+):", pending)
            if label:
                program.labels[label[1]] = len(program.instructions)
                pending = pending[label.end() :]
            elif pending[0] == "{":
                body.open()
                pending = pending[1:]
            elif pending[0] == "}":
                body.close()
                pending = pending[1:]
                if not body._scopes:
                    return program
            elif pending[0] == ";":
                pending = pending[1:]
            elif ";" in pending:
                statement, _, pending = pending.partition(";")
                body.statement(statement)
            else:
                break  # goes on in the next line
    raise ValueError(f"{program.name}: no end of the function")
