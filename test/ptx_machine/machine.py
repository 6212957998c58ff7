"""Runs a program of PTX for all threads of a grid at once, as vectors with a mask.

Of the threads that can run, those at the lowest instruction run next: they meet again where ways join, as
the shuffles and barriers of compiled code expect. That is one of the orders that a device may choose. What
depends on the order is looked for by `memory`'s watch over races, not by trying orders.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .memory import Accessor, Clocks, Fault, Global, Shared
from .program import (
    Address,
    Immediate,
    Instruction,
    Name,
    Program,
    Register,
    Special,
    Vector,
    bits_of,
)

LANES = 32
STORED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def dtype_of(kind: str) -> type:
    """numpy's type for a PTX type that numpy has: "s32", "f16", "b64", "pred"."""
    if kind in FLOATS:
        return FLOATS[kind]
    return SIGNED[bits_of(kind)] if kind[0] == "s" else STORED[bits_of(kind)]


class Machine:
    """One launch. ``arguments``: the bits of each parameter; ``grid``: programs in x, y, z."""

    def __init__(
        self,
        program: Program,
        arguments: list[int],
        grid: tuple[int, int, int],
        shared_bytes: int,
        memory: Global,
    ) -> None:
        if len(arguments) != len(program.parameters):
            raise ValueError(f"{program.name} has {len(program.parameters)} parameters")
        self.program, self.memory = program, memory
        self.parameters = dict(zip((n for n, _ in program.parameters), arguments, strict=True))
        self.programs, self.threads = int(np.prod(grid)), program.threads
        if self.threads % LANES:
            raise ValueError(f"{program.name} runs {self.threads} threads, not whole warps")
        self.lanes = self.programs * self.threads
        lane = np.arange(self.lanes)
        self.program_of, thread = lane // self.threads, lane % self.threads
        self.warp_of = thread // LANES
        self.shared = Shared(self.programs, shared_bytes)
        self.clocks = Clocks(self.programs, self.threads // LANES)
        self.phase = np.zeros(self.programs, np.int32)  # barriers so far
        x, y, z = grid
        flat = self.program_of
        self._special = {
            "%tid.x": thread,
            "%ctaid.x": flat % x,
            "%ctaid.y": flat // x % y,
            "%ctaid.z": flat // (x * y),
            "%ntid.x": np.full(self.lanes, self.threads),
            "%nctaid.x": np.full(self.lanes, x),
            "%nctaid.y": np.full(self.lanes, y),
            "%nctaid.z": np.full(self.lanes, z),
            "global_smem": np.full(self.lanes, Shared.BASE),
        }
        self._registers: dict[str, np.ndarray] = {}
        self.mask = np.ones(self.lanes, bool)
        self.all = True  # whether the mask is all ones
        # Of each program, groups of asynchronous copies; the last one is open.
        self.copies: list[list[list]] = [[[]] for _ in range(self.programs)]

    # Operands

    def bits(self, operand: object) -> np.ndarray:
        """[lanes] or a scalar, unsigned as it is stored."""
        if isinstance(operand, Register):
            value = self._registers.get(operand.name)
            if value is None:
                raise Fault(f"register {operand.name} is read before it is written")
            return value
        if isinstance(operand, Special):
            if operand.name == "%globaltimer":
                return np.full(self.lanes, time.monotonic_ns(), np.uint64)
            return self._special[operand.name].astype(np.uint32)
        raise TypeError(f"no value: {operand}")

    def read(self, operand: object, kind: str) -> np.ndarray:
        """[lanes] of numpy's type for ``kind``; bfloat16 comes as float32."""
        if kind == "bf16":
            return (self.read(operand, "b16").astype(np.uint32) << np.uint32(16)).view(np.float32)
        dtype = np.dtype(dtype_of(kind))
        if isinstance(operand, Immediate):
            if kind == "pred":
                return np.full(self.lanes, operand.bits != 0)
            width = bits_of(kind)
            stored = STORED[width](operand.bits & ((1 << width) - 1))
            return np.full(self.lanes, stored).view(dtype)
        value = self.bits(operand)
        if kind == "pred":
            return value
        if value.dtype.itemsize < dtype.itemsize:
            raise Fault(f"{operand} is narrower than {kind}")
        if value.dtype.itemsize > dtype.itemsize:
            value = value.astype(STORED[dtype.itemsize * 8])
        return value.view(dtype)

    def write(self, operand: object, value: np.ndarray) -> None:
        """A register of the active lanes; what is narrower is extended by its own sign."""
        if isinstance(operand, Name) and operand.name == "_":
            return
        assert isinstance(operand, Register), operand
        stored = np.dtype(STORED[operand.bits])
        if value.dtype == np.bool_ or stored == np.bool_:
            assert value.dtype == stored, (operand, value.dtype)
        elif value.dtype.itemsize == stored.itemsize:
            value = value.view(stored)
        else:
            if value.dtype.kind == "f":
                value = value.view(STORED[value.dtype.itemsize * 8])
            value = value.astype(stored)
        if not self.all:
            before = self._registers.get(operand.name)
            if before is None:
                before = np.zeros(self.lanes, stored)
            value = np.where(self.mask, value, before)
        self._registers[operand.name] = value

    def address(self, operand: Address, lanes: np.ndarray) -> np.ndarray:
        base = self.bits(operand.base)[lanes].astype(np.uint64)
        return base + np.uint64(operand.offset % (1 << 64))

    def active(self) -> np.ndarray:
        return np.flatnonzero(self.mask)

    def accessor(self, lanes: np.ndarray) -> Accessor:
        program = self.program_of[lanes]
        return Accessor(program, self.warp_of[lanes], self.phase[program], self.clocks)

    def warps(self) -> np.ndarray:
        """[n] the warps that are active, as indices into [lanes / 32, 32]; all of their lanes must be."""
        mask = self.mask.reshape(-1, LANES)
        some, every = mask.any(axis=1), mask.all(axis=1)
        if (some & ~every).any():
            raise Fault("some lanes of a warp are not here, others wait for them")
        return np.flatnonzero(every)

    # Control

    def run(self) -> None:
        from . import arithmetic, transfers, warps

        handlers: dict[str, Callable[[Machine, Instruction], None]] = {
            **arithmetic.HANDLERS,
            **transfers.HANDLERS,
            **warps.HANDLERS,
        }
        code = self.program.instructions
        steps = [handlers.get(i.opcode) for i in code]
        at = np.zeros(self.lanes, np.int64)
        live, waiting = np.ones(self.lanes, bool), np.zeros(self.lanes, bool)
        end = len(code)
        instruction = None
        try:
            with np.errstate(all="ignore"):
                while live.any():
                    able = live & ~waiting
                    if not able.any():
                        raise Fault("threads wait at a barrier that others of the program missed")
                    here = int(at[able].min())
                    mask = able & (at == here)
                    behind = at[able & ~mask]
                    stop = int(behind.min()) if len(behind) else end
                    while True:
                        if here >= stop:
                            at[mask] = here
                            break
                        instruction = code[here]
                        self.clocks.time += 1
                        self.mask, self.all = mask, bool(mask.all())
                        if instruction.opcode == "bra":
                            target = self.program.labels[instruction.operands[0].name]
                            taken = mask & self._guard(instruction)
                            if not taken.any():
                                here += 1
                            elif (taken == mask).all():
                                here = target
                            else:
                                at[taken], at[mask & ~taken] = target, here + 1
                                break
                        elif instruction.opcode == "ret":
                            done = mask & self._guard(instruction)
                            live[done] = False
                            at[mask] = here + 1
                            break
                        elif instruction.opcode == "bar":
                            if instruction.text != "bar.sync 0":
                                raise NotImplementedError(f"PTX instruction: {instruction}")
                            at[mask] = here + 1
                            waiting |= mask
                            self._release(waiting, live, at)
                            break
                        else:
                            step = steps[here]
                            if step is None:
                                raise NotImplementedError(f"PTX instruction: {instruction}")
                            if instruction.guard is not None:
                                self.mask = mask & self._guard(instruction)
                                self.all = bool(self.mask.all())
                            if self.all or self.mask.any():
                                step(self, instruction)
                            here += 1
        except Fault as fault:
            raise Fault(f"{self.program.name}: {fault}\n  at {instruction}") from None
        if any(group for groups in self.copies for group in groups):
            raise Fault(f"{self.program.name} ends with asynchronous copies under way")

    def _guard(self, instruction: Instruction) -> np.ndarray:
        if instruction.guard is None:
            return np.ones(self.lanes, bool)
        return self.bits(instruction.guard) != instruction.negated

    def _release(self, waiting: np.ndarray, live: np.ndarray, at: np.ndarray) -> None:
        """Programs all of whose threads have come go on, behind one barrier more."""
        shape = (self.programs, self.threads)
        held = waiting.reshape(shape)
        complete = (held | ~live.reshape(shape)).all(axis=1) & held.any(axis=1)
        for program in np.flatnonzero(complete):
            if len(np.unique(at.reshape(shape)[program][held[program]])) > 1:
                raise Fault("threads of a program wait at different barriers")
        self.phase[complete] += 1
        self.clocks.barrier(np.flatnonzero(complete))
        held[complete] = False


def vector(operand: object) -> tuple:
    return operand.parts if isinstance(operand, Vector) else (operand,)
