"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import numpy as np

from .machine import STORED, Machine, dtype_of, vector
from .memory import Fault
from .program import Instruction, Name, bits_of

SPACES = {"global", "shared", "param"}
NOT_WATCHED = {"volatile", "acquire", "release"}
KNOWN = SPACES | NOT_WATCHED | {"sys", "v2", "v4"}


def _space(i: Instruction) -> tuple[str, str, bool]:
    """Space, type of an element, and whether races count."""
    *how, kind = i.modifiers
    if set(how) - KNOWN:
        raise NotImplementedError(f"PTX instruction: {i}")
    return next(x for x in how if x in SPACES), kind, not NOT_WATCHED & set(how)


def load(m: Machine, i: Instruction) -> None:
    space, kind, watched = _space(i)
    outs, size = vector(i.operands[0]), bits_of(kind) // 8
    if space == "param":
        assert isinstance(i.operands[1].base, Name) and not i.operands[1].offset
        value = m.parameters[i.operands[1].base.name] & ((1 << 8 * size) - 1)
        stored = np.full(m.lanes, STORED[8 * size](value))
        return m.write(outs[0], stored.view(dtype_of(kind)))
    lanes = m.active()
    address, nbytes = m.address(i.operands[1], lanes), size * len(outs)
    by = m.accessor(lanes) if watched else None
    data = (m.shared if space == "shared" else m.memory).read(address, nbytes, by)
    for place, out in enumerate(outs):
        value = np.zeros(m.lanes, dtype_of(kind))
        part = np.ascontiguousarray(data[:, place * size : (place + 1) * size])
        value[lanes] = part.view(dtype_of(kind))[:, 0]
        m.write(out, value)
    return None


def _bytes(m: Machine, values: tuple, kind: str, lanes: np.ndarray) -> np.ndarray:
    """[n, nbytes] of the operands side by side."""
    width = STORED[bits_of(kind)]
    columns = [m.read(x, f"b{bits_of(kind)}")[lanes].astype(width) for x in values]
    return np.stack(columns, axis=1).view(np.uint8).reshape(len(lanes), -1)


def store(m: Machine, i: Instruction) -> None:
    space, kind, watched = _space(i)
    lanes = m.active()
    values = _bytes(m, vector(i.operands[1]), kind, lanes)
    by = m.accessor(lanes) if watched else None
    memory = m.shared if space == "shared" else m.memory
    memory.write(m.address(i.operands[0], lanes), values, by)


def atomic(m: Machine, i: Instruction) -> None:
    """One lane after the other, in the order of lanes."""
    if i.modifiers != ("global", "sys", "acq_rel", "add", "u32"):
        raise NotImplementedError(f"PTX instruction: {i}")
    out, where, amount = i.operands
    lanes = m.active()
    old, amounts = np.zeros(m.lanes, np.uint32), m.read(amount, "u32")
    for lane, address in zip(lanes, m.address(where, lanes), strict=True):
        at = np.array([address])
        old[lane] = m.memory.read(at, 4, None).view(np.uint32)[0, 0]
        new = np.array([[old[lane] + amounts[lane]]], np.uint32)
        m.memory.write(at, new.view(np.uint8), None)
        m.clocks.synchronize(int(m.program_of[lane]), int(m.warp_of[lane]), int(address))
    m.write(out, old)


def copy(m: Machine, i: Instruction) -> None:
    """cp.async: into shared memory, there when a group has been waited for."""
    what = i.modifiers[1:] if i.modifiers[0] == "async" else ()
    lanes = m.active()
    programs = np.unique(m.program_of[lanes])
    if what[:1] in (("commit_group",), ("wait_group",)) and len(lanes) != len(programs) * m.threads:
        raise Fault("some threads of a program do not commit, or wait for, copies")
    if what[:1] == ("commit_group",):
        for program in programs:
            m.copies[program].append([])
    elif what[:1] == ("wait_group",):
        left = i.operands[0].bits
        for program in programs:
            *committed, still_open = m.copies[program]
            done = max(0, len(committed) - left)
            for group in committed[:done]:
                for address, nbytes, of in group:
                    m.shared.end_copy(address, nbytes, m.accessor(of))
            m.copies[program] = [*committed[done:], still_open]
    elif what == ("cg", "shared", "global") or what == ("ca", "shared", "global"):
        to, source, size, *given = i.operands
        nbytes = size.bits
        values = np.zeros((len(lanes), nbytes), np.uint8)
        present = m.read(given[0], "u32")[lanes] if given else np.full(len(lanes), nbytes)
        if not np.isin(present, (0, nbytes)).all():
            raise NotImplementedError(f"PTX instruction: {i}")
        some = np.flatnonzero(present)
        if len(some):
            where = m.address(source, lanes[some])
            values[some] = m.memory.read(where, nbytes, m.accessor(lanes[some]))
        address = m.address(to, lanes)
        m.shared.begin_copy(address, values, m.accessor(lanes))
        for program in programs:
            mine = m.program_of[lanes] == program
            m.copies[program][-1].append((address[mine], nbytes, lanes[mine]))
    else:
        raise NotImplementedError(f"PTX instruction: {i}")


def fence(m: Machine, i: Instruction) -> None:
    """Orders what is in order here."""


HANDLERS = {"ld": load, "st": store, "atom": atomic, "cp": copy, "fence": fence}
