"""Instructions that the lanes of a warp, or of four, execute together."""

from __future__ import annotations

import re

import numpy as np

from .machine import LANES, Machine, vector
from .memory import Fault
from .program import Instruction

LANE = np.arange(LANES)
GROUP, IN_GROUP = LANE // 4, LANE % 4


def _members(m: Machine, operand: object) -> None:
    if (m.read(operand, "b32")[m.mask] != 0xFFFFFFFF).any():
        raise NotImplementedError("instructions of some lanes of a warp")


def shuffle(m: Machine, i: Instruction) -> None:
    _, how, kind = i.modifiers
    out, value, by, clamp, members = i.operands
    _members(m, members)
    warps = m.warps()
    source = m.read(value, kind).reshape(-1, LANES)
    step = m.read(by, "b32").reshape(-1, LANES).astype(np.int64)
    limit = m.read(clamp, "b32").reshape(-1, LANES).astype(np.int64)
    if ((limit >> 8) != 0).any():
        raise NotImplementedError(f"PTX instruction: {i}")
    if how == "bfly":
        lane = LANE ^ step
        lane = np.where(lane <= limit, lane, LANE)
    elif how == "up":
        lane = np.where(LANE - step >= limit, LANE - step, LANE)
    elif how == "down":
        lane = np.where(LANE + step <= limit, LANE + step, LANE)
    elif how == "idx":
        lane = np.where((step & 31) <= limit, step & 31, LANE)
    else:
        raise NotImplementedError(f"PTX instruction: {i}")
    result = source.copy()
    result[warps] = np.take_along_axis(source[warps], lane[warps], axis=1)
    m.write(out, result.reshape(-1))


def reduce(m: Machine, i: Instruction) -> None:
    _, how, kind = i.modifiers
    out, value, members = i.operands
    _members(m, members)
    m.warps()
    operation = {"add": np.add, "max": np.maximum, "min": np.minimum}[how]
    source = m.read(value, kind).reshape(-1, LANES)
    whole = operation.reduce(source, axis=1, dtype=source.dtype)
    m.write(out, np.repeat(whole, LANES))


def _matrices(i: Instruction) -> tuple[int, bool]:
    shape = next(x for x in i.modifiers if re.fullmatch(r"x[124]", x))
    if {"shared", "b16", "m8n8"} - set(i.modifiers):
        raise NotImplementedError(f"PTX instruction: {i}")
    return int(shape[1:]), "trans" in i.modifiers


def _rows(m: Machine, operand: object, matrices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Active warps, the lanes that name the rows of the matrices, and the addresses of these rows."""
    warps = m.warps()
    lanes = (warps[:, None] * LANES + LANE[: 8 * matrices]).reshape(-1)
    return warps, lanes, m.address(operand, lanes)


def load_matrices(m: Machine, i: Instruction) -> None:
    """Lane t of a warp gets, of each 8x8, elements 2 (t % 4) and 1 more of row t / 4; or of a column."""
    count, transposed = _matrices(i)
    warps, lanes, address = _rows(m, i.operands[1], count)
    data = m.shared.read(address, 16, m.accessor(lanes))
    matrix = data.view(np.uint16).reshape(len(warps), count, 8, 8).astype(np.uint32)
    if transposed:
        matrix = matrix.swapaxes(2, 3)
    pairs = matrix[..., 0::2] | matrix[..., 1::2] << np.uint32(16)  # [warps, count, 8, 4]
    for place, out in enumerate(vector(i.operands[0])):
        value = np.zeros((m.lanes // LANES, LANES), np.uint32)
        value[warps] = pairs[:, place].reshape(len(warps), LANES)
        m.write(out, value.reshape(-1))


def store_matrices(m: Machine, i: Instruction) -> None:
    count, transposed = _matrices(i)
    warps, lanes, address = _rows(m, i.operands[0], count)
    matrix = np.empty((len(warps), count, 8, 8), np.uint16)
    for place, part in enumerate(vector(i.operands[1])):
        pairs = m.read(part, "b32").reshape(-1, LANES)[warps].reshape(-1, 8, 4)
        matrix[:, place, :, 0::2] = pairs & np.uint32(0xFFFF)
        matrix[:, place, :, 1::2] = pairs >> np.uint32(16)
    if transposed:
        matrix = matrix.swapaxes(2, 3)
    data = np.ascontiguousarray(matrix).reshape(-1, 8).view(np.uint8)
    m.shared.write(address, data, m.accessor(lanes))


def _elements(m: Machine, operands: tuple, kind: str) -> np.ndarray:
    """[warps, lanes, elements] as float32: two of 16 bits in a register, or one of 32."""
    registers = np.stack([m.read(x, "b32").reshape(-1, LANES) for x in operands], axis=-1)
    if kind == "tf32":
        return (registers & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=-1)
    if kind == "bf16":
        values = (halves << np.uint32(16)).view(np.float32)
    else:
        values = halves.astype(np.uint16).view(np.float16).astype(np.float32)
    return values.reshape(*registers.shape[:2], -1)


def _tile_of_a(a: np.ndarray, columns: int) -> np.ndarray:
    """Fragments of an operand of 16 rows -> [warps, 16, columns]."""
    tile = np.empty((len(a), 16, columns), np.float32)
    if columns == 8:  # one element a register
        for e in range(4):
            tile[:, GROUP + 8 * (e % 2), IN_GROUP + 4 * (e // 2)] = a[:, :, e]
    else:
        for e in range(8):
            row, column = GROUP + 8 * (e // 2 % 2), 2 * IN_GROUP + e % 2 + 8 * (e // 4)
            tile[:, row, column] = a[:, :, e]
    return tile


def _tile_of_b(b: np.ndarray, rows: int) -> np.ndarray:
    tile = np.empty((len(b), rows, 8), np.float32)
    if rows == 8:
        for e in range(2):
            tile[:, IN_GROUP + 4 * e, GROUP] = b[:, :, e]
    else:
        for e in range(4):
            tile[:, 2 * IN_GROUP + e % 2 + 8 * (e // 2), GROUP] = b[:, :, e]
    return tile


def cut(value: np.ndarray) -> np.ndarray:
    """float64 -> float32 towards 0: tensor cores cut off what they add."""
    near = value.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(value)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


def multiply_tiles(m: Machine, i: Instruction) -> None:
    """mma: D = A B + C of a warp, 16 x 8."""
    sync, aligned, shape, *layout, d_kind, a_kind, b_kind, c_kind = i.modifiers
    depth = {"m16n8k16": 16, "m16n8k8": 8}.get(shape)
    kinds = {16: ("bf16", "f16"), 8: ("tf32",)}
    if (
        depth is None
        or a_kind != b_kind
        or a_kind not in kinds[depth]
        or (d_kind, c_kind, *layout) != ("f32", "f32", "row", "col")
    ):
        raise NotImplementedError(f"PTX instruction: {i}")
    warps = m.warps()
    d, a, b, c = (vector(x) for x in i.operands)
    left = _tile_of_a(_elements(m, a, a_kind)[warps], depth).astype(np.float64)
    right = _tile_of_b(_elements(m, b, b_kind)[warps], depth).astype(np.float64)
    product = left @ right
    for e, (out, added) in enumerate(zip(d, c, strict=True)):
        value = m.read(added, "f32").reshape(-1, LANES).copy()
        part = product[:, GROUP + 8 * (e // 2), 2 * IN_GROUP + e % 2]
        value[warps] = cut(value[warps] + part)
        m.write(out, value.reshape(-1))


SWIZZLE_BYTES = {1: 128, 2: 64, 3: 32}


def _described(m: Machine, descriptor: int, program: int, rows: int, columns: int) -> np.ndarray:
    """[rows, columns] of 16 bits in shared memory, the columns contiguous, rows in groups of eight."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    pitch = SWIZZLE_BYTES.get(descriptor >> 62)
    if pitch is None or 2 * columns > pitch or descriptor >> 49 & 7:
        raise NotImplementedError(f"descriptor of a matrix: {descriptor:#x}")
    k = np.repeat(np.arange(rows), columns)
    n = np.tile(np.arange(columns), rows)
    address = start + k // 8 * stride + k % 8 * pitch + 2 * n
    address ^= (address >> 7 & (pitch // 16 - 1)) << 4
    for warp in range(4):  # all of them read it
        lanes = np.full(len(address), program * m.threads + LANES * warp)
        data = m.shared.read(address.astype(np.uint64), 2, m.accessor(lanes))
    return data.reshape(rows, columns, 2)


def warp_groups(m: Machine, i: Instruction) -> None:
    """wgmma: of four warps, 64 rows; A in registers, B in shared memory."""
    if i.modifiers[0] in ("fence", "commit_group", "wait_group"):
        m.warps()
        return
    shape = re.fullmatch(r"m64n(\d+)k16", i.modifiers[3])
    if shape is None or i.modifiers[4] != "f32" or len(i.operands) != 7:
        raise NotImplementedError(f"PTX instruction: {i}")
    columns, kind = int(shape[1]), i.modifiers[5]
    d, a, described, scaled, *signs, transposed = i.operands
    if [x.bits for x in signs] != [1, 1] or not transposed.bits or len(a.parts) != 4:
        raise NotImplementedError(f"PTX instruction: {i}")
    warps = m.warps()
    if len(warps) % 4 or m.threads % 128:
        raise Fault("a product of four warps that not all four compute")
    left = _tile_of_a(_elements(m, a.parts, kind)[warps], 16).astype(np.float64)
    descriptors = m.read(described, "b64").reshape(-1, LANES)[warps]
    if (descriptors.reshape(-1, 4 * LANES) != descriptors.reshape(-1, 4 * LANES)[:, :1]).any():
        raise Fault("warps of a product disagree about its operand")
    right = np.empty((len(warps), 16, columns))
    for group in range(0, len(warps), 4):
        program = int(warps[group]) * LANES // m.threads
        bits = _described(m, int(descriptors[group, 0]), program, 16, columns)
        if kind == "f16":
            values = np.ascontiguousarray(bits).view(np.float16)[..., 0]
        else:
            wide = np.ascontiguousarray(bits).view(np.uint16)[..., 0].astype(np.uint32)
            values = (wide << np.uint32(16)).view(np.float32)
        right[group : group + 4] = values
    product = left @ right
    keep = m.read(scaled, "pred").reshape(-1, LANES)
    for e, out in enumerate(vector(d)):
        before = np.zeros(m.lanes, np.float32)
        if keep[warps].any():  # what is not added to may hold anything
            before = m.read(out, "f32").copy()
        value = before.reshape(-1, LANES)
        part = product[:, GROUP + 8 * (e // 2 % 2), 2 * IN_GROUP + e % 2 + 8 * (e // 4)]
        value[warps] = cut(np.where(keep[warps], value[warps], 0) + part)
        m.write(out, value.reshape(-1))


HANDLERS = {
    "shfl": shuffle,
    "redux": reduce,
    "ldmatrix": load_matrices,
    "stmatrix": store_matrices,
    "mma": multiply_tiles,
    "wgmma": warp_groups,
}
