"""Memory for KV pages, far larger than the caches, and page lists that never repeat pages still cached."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

TILE_ELEMENTS = 33_554_393  # prime, so that no two pages begin at the same element of the tile
_V_SHIFT = 7_654_321  # V starts at another offset of the tile than K


@dataclass(frozen=True)
class Shape:
    """B sequences of R pages of S tokens; H KV heads of D, each with G query heads."""

    models: str
    B: int
    R: int
    H: int
    G: int
    D: int
    S: int = 32

    @property
    def page_bytes(self) -> int:
        """Of K, in bfloat16."""
        return self.S * self.H * self.D * 2

    @property
    def call_bytes(self) -> int:
        """K and V that one call reads, in bfloat16."""
        return self.B * self.R * self.page_bytes * 2

    @property
    def scale(self) -> float:
        return self.D**-0.5


class KvPool:
    """Anonymous memory, in huge pages if the system has them: K in the lower half, V in the upper half.

    Args:
        nbytes: of K and V together.

    Attributes:
        elements: bfloat16 [nbytes / 2] of a normal distribution, K then V. The same in every process.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        bits = _mapped(nbytes).view(np.uint16)
        values = np.random.default_rng(0).standard_normal(TILE_ELEMENTS, np.float32)
        tile = (values.view(np.uint32) >> 16).astype(np.uint16)
        half = len(bits) // 2
        _repeat(tile, bits[:half])
        _repeat(np.roll(tile, -_V_SHIFT), bits[half:])
        self.elements = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The elements converted to an 8-bit type, in separate memory."""
        return torch.from_numpy(_mapped(self.nbytes // 2)).view(dtype).copy_(self.elements)

    def planes(
        self, shape: Shape, elements: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [P, S, H, D], of the result of `rounded` if given."""
        elements = self.elements if elements is None else elements
        half, page = len(elements) // 2, shape.page_bytes // 2
        k, v = (
            plane[: half // page * page].view(-1, shape.S, shape.H, shape.D)
            for plane in (elements[:half], elements[half:])
        )
        return k, v


class PageStream:
    """An endless stream of shuffled page ids; an id repeats only after all others.

    ``ids`` int32 is the shuffled list repeated, so that any ``take(n)`` with n <= longest is one slice of it.
    """

    def __init__(self, num_pages: int, longest: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
        self.num_pages = num_pages
        self.ids = np.tile(order, -(-longest // num_pages) + 1)
        self._at = 0

    def take(self, n: int) -> int:
        """Position in ``ids`` of the next n."""
        at = self._at
        assert at + n <= len(self.ids)
        self._at = (at + n) % self.num_pages
        return at


class Inputs:
    """Query and page lists of one shape over a pool. q is exact in bfloat16."""

    def __init__(self, pool: KvPool, shape: Shape) -> None:
        self.pool, self.shape = pool, shape
        self.stream = PageStream(len(pool.planes(shape)[0]), shape.B * shape.R, seed=1)
        q = np.random.default_rng(2).standard_normal((shape.B, shape.H * shape.G, shape.D))
        self.q = torch.from_numpy(q).bfloat16().float()

    def take(self, calls: int) -> list[int]:
        """Positions in the stream of the page lists of ``calls`` calls."""
        return [self.stream.take(self.shape.B * self.shape.R) for _ in range(calls)]

    def pages(self, at: int) -> torch.Tensor:
        """int32 [B, R]"""
        n = self.shape.B * self.shape.R
        return torch.from_numpy(self.stream.ids[at : at + n]).view(self.shape.B, self.shape.R)


def _mapped(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of anonymous memory."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _repeat(tile: np.ndarray, to: np.ndarray) -> None:
    for at in range(0, len(to), len(tile)):
        to[at : at + len(tile)] = tile[: len(to) - at]
