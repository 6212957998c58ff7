"""Memory of a launch, and who touched what: bounds, alignment, races.

A race is two accesses to one byte, one of them a write that changes it, by two warps with nothing between
that orders them. Within a program a barrier orders; between programs atomics that release and acquire,
for the warp that executes them, and for the others behind the next barrier (`Clocks`). The threads of a warp
count as one. Not looked for: atomics, volatile and acquiring or releasing accesses against plain ones.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

NOBODY, MANY = -1, -2


class Fault(Exception):
    """What a device would end the kernel for, or what its memory model leaves open."""


class Clocks:
    """Until when each warp of each program has seen what each other warp did.

    Times are those of the machine, which counts instructions. Large grids have no clocks: nothing is
    ordered between their programs, and they may have no atomics.
    """

    MOST_WARPS = 512

    def __init__(self, programs: int, warps: int) -> None:
        self._warps, count = warps, programs * warps
        self._seen = np.zeros((count, count), np.int64) if count <= self.MOST_WARPS else None
        self._words: dict[int, np.ndarray] = {}  # address of a word of atomics: what it releases
        self.time = 1

    def _rows(self, programs: np.ndarray) -> np.ndarray:
        """[n] programs -> [n, warps] of the matrix."""
        return programs[:, None] * self._warps + np.arange(self._warps)

    def barrier(self, programs: np.ndarray) -> None:
        """All warps of each of ``programs`` know what any of them knows."""
        if self._seen is not None and len(programs):
            rows = self._rows(programs)
            self._seen[rows, rows] = self.time
            self._seen[rows] = self._seen[rows].max(axis=1, keepdims=True)

    def synchronize(self, program: int, warp: int, address: int) -> None:
        """An atomic that releases and acquires, by one warp."""
        if self._seen is None:
            raise NotImplementedError(f"atomics in a grid of more than {self.MOST_WARPS} warps")
        row = program * self._warps + warp
        mine = self._seen[row]
        mine[row] = self.time
        released = self._words.get(address)
        if released is not None:
            np.maximum(mine, released, out=mine)
        self._words[address] = mine.copy()

    def ordered(
        self,
        by: Accessor,
        program: np.ndarray,
        warp: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        """[n] whether what another program's ``warp`` did at ``time`` comes before what ``by`` does now."""
        if self._seen is None:
            return np.zeros(len(program), bool)
        seen = self._seen[by.program * self._warps + by.warp].reshape(len(program), -1, self._warps)
        each = np.arange(len(program))
        known = seen[each, np.maximum(program, 0)]  # [n, warps]
        until = np.where(warp == MANY, known.min(axis=1), known[each, np.maximum(warp, 0)])
        if (program == MANY).any():
            others = seen.copy()
            others[each, by.program] = np.iinfo(np.int64).max
            until = np.where(program == MANY, others.min(axis=(1, 2)), until)
        return until >= time


@dataclass
class Who:
    """Per byte, the last access of one kind: program, warp, barriers before it, time. MANY: more than one."""

    program: np.ndarray
    warp: np.ndarray
    phase: np.ndarray
    time: np.ndarray

    @classmethod
    def of(cls, size: int) -> Who:
        return cls(
            np.full(size, NOBODY, np.int32),
            *(np.zeros(size, np.int32) for _ in range(2)),
            np.zeros(size, np.int64),
        )


@dataclass
class Accessor:
    """The lanes of one access, each [n]."""

    program: np.ndarray
    warp: np.ndarray
    phase: np.ndarray
    clocks: Clocks

    def at(self, lanes: np.ndarray) -> Accessor:
        return Accessor(self.program[lanes], self.warp[lanes], self.phase[lanes], self.clocks)

    def over(self, nbytes: int) -> Accessor:
        """The same, once for each of ``nbytes`` bytes."""
        return Accessor(
            *(np.repeat(x, nbytes) for x in (self.program, self.warp, self.phase)), self.clocks
        )


class Watched:
    """Bytes that note who read and wrote them."""

    def __init__(self, data: np.ndarray, name: str, replicas: bool = False) -> None:
        """``replicas``: whether warps may write a byte in one instruction, each its copy of one value. Copies
        of a sum may differ in its last bit, since a product is fused with the addition on one side."""
        self.data, self.name, self._replicas = data, name, replicas
        self._wrote: Who | None = None
        self._read: Who | None = None

    def _conflict(self, who: Who, at: np.ndarray, by: Accessor) -> np.ndarray:
        program, warp = who.program[at], who.warp[at]
        same = program == by.program
        within = same & (warp != by.warp) & (who.phase[at] == by.phase)
        between = (program != NOBODY) & ~same
        if between.any():
            some = np.flatnonzero(between)
            ordered = by.clocks.ordered(by.at(some), program[some], warp[some], who.time[at[some]])
            between[some] &= ~ordered
        return within | between

    def read(self, at: np.ndarray, nbytes: int, by: Accessor | None) -> np.ndarray:
        """[n] offsets -> [n, nbytes]; ``by`` None: an access of the host's memory model, not watched."""
        where = at[:, None] + np.arange(nbytes)
        if by is not None:
            flat, by = where.reshape(-1), by.over(nbytes)
            if self._wrote is not None:
                self._refuse(self._conflict(self._wrote, flat, by), flat, "read", "written")
            if self._read is None:
                self._read = Who.of(len(self.data))
            self._note_read(self._read, flat, by)
        return self.data[where]

    def _note_read(self, who: Who, at: np.ndarray, by: Accessor) -> None:
        before = who.program[at].copy(), who.warp[at].copy(), who.phase[at].copy()
        who.program[at], who.warp[at], who.phase[at] = by.program, by.warp, by.phase
        # Lanes of this access, or earlier ones, of other programs or warps.
        others = (who.program[at] != by.program) | (
            (before[0] != NOBODY) & (before[0] != by.program)
        )
        warps = (who.warp[at] != by.warp) | (
            (before[0] == by.program) & (before[2] == by.phase) & (before[1] != by.warp)
        )
        who.warp[at[warps]] = MANY
        who.program[at[others]] = MANY
        who.time[at] = by.clocks.time

    def write(self, at: np.ndarray, values: np.ndarray, by: Accessor | None) -> None:
        """``values`` [n, nbytes] to offsets [n]; of two lanes that write one byte the last one stays."""
        nbytes = values.shape[1]
        flat = (at[:, None] + np.arange(nbytes)).reshape(-1)
        if by is None:
            self.data[flat] = values.reshape(-1)
            return
        by = by.over(nbytes)
        changed = self.data[flat] != values.reshape(-1)
        for who, what in ((self._wrote, "written"), (self._read, "read")):
            if who is not None:
                self._refuse(self._conflict(who, flat, by) & changed, flat, "write", what)
        if self._wrote is None:
            self._wrote = Who.of(len(self.data))
        self.data[flat] = values.reshape(-1)
        # What changes nothing leaves the record of the one who did.
        noted = changed | (self._wrote.program[flat] == NOBODY)
        self._note_written(flat[noted], by.at(np.flatnonzero(noted)))
        lost = ~self._stays(at, values).repeat(nbytes)
        other = (self._wrote.program[flat] != by.program) | (self._wrote.warp[flat] != by.warp)
        self._refuse(lost & other, flat, "write", "written by the same instruction")

    def settle(self, at: np.ndarray, by: Accessor) -> None:
        """What was written to offsets [n] is there now: others see it behind the next barrier."""
        if self._wrote is not None:
            self._note_written(at, by)

    def _note_written(self, at: np.ndarray, by: Accessor) -> None:
        assert self._wrote is not None
        self._wrote.program[at], self._wrote.warp[at] = by.program, by.warp
        self._wrote.phase[at], self._wrote.time[at] = by.phase, by.clocks.time

    def _stays(self, at: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[n] whether what was just written is there, and not what another lane wrote instead."""
        there = self.data[at[:, None] + np.arange(values.shape[1])]
        same = (there == values).all(axis=1)
        if self._replicas and values.shape[1] % 4 == 0 and not same.all():
            pair = (np.ascontiguousarray(x).view(np.float32) for x in (there, values))
            same |= np.isclose(*pair, rtol=1e-5, atol=0, equal_nan=True).all(axis=1)
        return same

    def _refuse(self, conflict: np.ndarray, at: np.ndarray, now: str, before: str) -> None:
        if conflict.any():
            first = at[conflict][0]
            raise Fault(
                f"race in {self.name}: {now} of byte {first} that another warp has {before}"
            )


@dataclass
class Region:
    start: int
    end: int
    watched: Watched


def _bytes_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _allocation(address: int) -> tuple[int, int] | None:
    """Start and size of what a tensor of this process lies in at ``address``; the young ones first."""
    if found := _mapping(address):
        return found
    for generation in range(3):
        for thing in gc.get_objects(generation):
            if type(thing) is torch.Tensor and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                start = storage.data_ptr()
                if start <= address < start + storage.nbytes():
                    return start, storage.nbytes()
    return None


def _mapping(address: int) -> tuple[int, int] | None:
    """Start and size of the shared mapping, an arena's as a rule, that ``address`` lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, *_ = line.split()
        start, end = (int(x, 16) for x in bounds.split("-"))
        if start <= address < end and access.endswith("s"):
            return start, end - start
    return None


@dataclass
class Global:
    """The process's memory, as far as it belongs to an allocation."""

    regions: dict[int, Region] = field(default_factory=dict)

    def add(self, start: int, size: int) -> None:
        if size and start not in self.regions:
            watched = Watched(_bytes_at(start, size), f"global memory at {start:#x}")
            self.regions[start] = Region(start, start + size, watched)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.add(storage.data_ptr(), storage.nbytes())

    def _region(self, address: int, searched: bool = False) -> Region:
        for region in self.regions.values():
            if region.start <= address < region.end:
                return region
        if searched:
            raise Fault(f"access to address {address:#x}, which belongs to no allocation")
        found = _allocation(address)
        if found is not None:
            self.add(*found)
        return self._region(address, searched=True)

    def _split(self, address: np.ndarray, nbytes: int):
        """Lanes by region: (region, lanes or None for all)."""
        if (address % np.uint64(nbytes)).any():
            wrong = int(address[address % np.uint64(nbytes) != 0][0])
            raise Fault(f"address {wrong:#x} is not a multiple of {nbytes}")
        left = np.arange(len(address))
        while len(left):
            region = self._region(int(address[left[0]]))
            inside = (address[left] >= region.start) & (address[left] < region.end)
            if (address[left[inside]] + np.uint64(nbytes) > region.end).any():
                raise Fault(f"access beyond the end of an allocation, {region.end:#x}")
            yield region, left[inside]
            left = left[~inside]

    @staticmethod
    def _some(by: Accessor | None, lanes: np.ndarray) -> Accessor | None:
        return None if by is None else by.at(lanes)

    def read(self, address: np.ndarray, nbytes: int, by: Accessor | None) -> np.ndarray:
        values = np.empty((len(address), nbytes), np.uint8)
        for region, lanes in self._split(address, nbytes):
            at = (address[lanes] - np.uint64(region.start)).astype(np.int64)
            values[lanes] = region.watched.read(at, nbytes, self._some(by, lanes))
        return values

    def write(self, address: np.ndarray, values: np.ndarray, by: Accessor | None) -> None:
        for region, lanes in self._split(address, values.shape[1]):
            at = (address[lanes] - np.uint64(region.start)).astype(np.int64)
            region.watched.write(at, values[lanes], self._some(by, lanes))


class Shared:
    """The shared memory of all programs, one behind the other; filled with what no kernel may read."""

    BASE = 0x400  # so that an address of 0 is a fault

    def __init__(self, programs: int, size: int) -> None:
        self.size = size
        self._watched = Watched(np.full(programs * size, 0xC5, np.uint8), "shared memory", True)
        self._in_flight = np.zeros(programs * size, bool)

    def _at(self, address: np.ndarray, nbytes: int, programs: np.ndarray) -> np.ndarray:
        at = address.astype(np.int64) - self.BASE
        if len(at) and (at.min() < 0 or at.max() + nbytes > self.size):
            raise Fault(f"access outside of {self.size} bytes of shared memory")
        if (at % nbytes).any():
            raise Fault(f"address in shared memory is not a multiple of {nbytes}")
        return at + programs.astype(np.int64) * self.size

    def _settled(self, at: np.ndarray, nbytes: int) -> None:
        if self._in_flight[at[:, None] + np.arange(nbytes)].any():
            raise Fault("access to shared memory that an asynchronous copy is still writing")

    def read(self, address: np.ndarray, nbytes: int, by: Accessor) -> np.ndarray:
        at = self._at(address, nbytes, by.program)
        self._settled(at, nbytes)
        return self._watched.read(at, nbytes, by)

    def write(self, address: np.ndarray, values: np.ndarray, by: Accessor) -> None:
        at = self._at(address, values.shape[1], by.program)
        self._settled(at, values.shape[1])
        self._watched.write(at, values, by)

    def begin_copy(self, address: np.ndarray, values: np.ndarray, by: Accessor) -> None:
        """An asynchronous write: others must be done with the bytes now, none may touch them until it ends."""
        self.write(address, values, by)
        at = self._at(address, values.shape[1], by.program)
        self._in_flight[at[:, None] + np.arange(values.shape[1])] = True

    def end_copy(self, address: np.ndarray, nbytes: int, by: Accessor) -> None:
        at = self._at(address, nbytes, by.program)[:, None] + np.arange(nbytes)
        self._in_flight[at] = False
        self._watched.settle(at.reshape(-1), by.over(nbytes))
